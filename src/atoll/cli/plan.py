"""`atoll plan`: one page for a run over several sites."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from atoll.cli.lists import number, print_json, significant
from atoll.cli.shared import document_of
from atoll.estimate import profile as profiles
from atoll.estimate.bandwidth import ROOM
from atoll.estimate.plan import FIRST_H, LADDER, Plan, SitePlan, check_question, make_plan
from atoll.estimate.regions import Regions, convert_regions, measured_values
from atoll.observe.figures import count, percent, span, table
from atoll.protocol.errors import ConfigError


def plan(*, file: Path, seeds: int, hours: float, json_: bool) -> None:
    check_question(seeds, hours)
    document = document_of(file)
    try:
        regions = read_regions(document, file.parent)
        profile = profiles.load(regions.profile)
        found = make_plan(regions, profile, seeds=seeds, hours=hours)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    commands = list(list_commands(regions, found))
    if json_:
        print_json({**msgspec.to_builtins(found), "commands": commands, "provenance": profile.provenance})
        return
    _print(regions, found, commands, profile.provenance)


def read_regions(document: dict[str, Any], folder: Path) -> Regions:
    """Numbers may be written as 7B; links that were measured take their figures from the doctor's file in `folder`."""
    model = document.get("model")
    for key in ("parameters", "tokens_per_step", "tokens"):
        if isinstance(model, dict) and isinstance(model.get(key), str):
            model[key] = number(f"model.{key}", model[key])
    regions = convert_regions(document)
    links = [
        msgspec.structs.replace(link, measured="", **_read_measured(folder / link.measured)) if link.measured else link
        for link in regions.links
    ]
    return msgspec.structs.replace(regions, links=tuple(links))


def _read_measured(file: Path) -> dict[str, float]:
    try:
        document: Any = json.loads(file.read_text())
        return measured_values(document if isinstance(document, dict) else {})
    except OSError as error:
        raise ConfigError(f"measured: cannot read {file}: {error.strerror}") from None
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"measured: {file}: {error}") from None


# ---- the commands ---------------------------------------------------------------------------------------------------


def list_commands(regions: Regions, plan: Plan) -> Iterator[str]:
    """HOST, LINK and train.py are the reader's own. A line that begins with # says where the next ones are run."""
    settings = {"sync_every": plan.sync_every, "codec": plan.codec, "version_codec": plan.version_codec}
    usual = {"sync_every": FIRST_H, "codec": LADDER[0][0], "version_codec": LADDER[0][1]}
    changed = "".join(f" --set {key}={value}" for key, value in settings.items() if value != usual[key])
    tokens = f" --tokens {regions.model.tokens:.0f}" if regions.model.tokens else ""
    yield f"# {regions.home}, where the syncer is"
    yield "atoll cert --host HOST"
    yield f"atoll syncer --bind 0.0.0.0 --keys atoll-keys --advertise HOST --learners {plan.learners}{tokens}{changed}"
    for site in plan.sites:
        where = "every learner's machine" if site.machines_per_learner == 1 else "every machine"
        yield f"# {site.site}, on {where}"
        join = "LINK"
        if site.relay:
            yield "# first, on one of them that the others reach"
            yield "atoll cert --out relay-keys"
            yield f"atoll relay --join LINK --keys relay-keys --host 0.0.0.0 --name {site.site}"
            join = f"atoll-relays/{site.site}/link"
        if site.site != regions.home:
            yield f"atoll doctor --join LINK --parameters {regions.model.parameters:.0f} --step {plan.step_s:.3g}"
        yield _learner_command(site, regions.site(site.site).gpus, join)


def _learner_command(site: SitePlan, gpus: int, join: str) -> str:
    names = f"{site.site}-0" if site.learners == 1 else f"{site.site}-0 … {site.site}-{site.learners - 1}"
    learn = f"atoll learn train.py --join {join} --name NAME    # {names}"
    if site.machines_per_learner * gpus == 1:
        return learn
    launch = f"torchrun --nnodes {site.machines_per_learner} --nproc-per-node {gpus}"
    if site.machines_per_learner > 1:
        launch += " --rdzv-backend c10d --rdzv-endpoint FIRST:29500"
    return f"{launch} --module {learn}"


# ---- the page -------------------------------------------------------------------------------------------------------


def _print(regions: Regions, plan: Plan, commands: list[str], provenance: str) -> None:
    console = Console(highlight=False)
    console.print(
        f"H = {plan.sync_every}, P = {plan.fragments}, {plan.codec} up, {plan.version_codec} down, "
        f"{plan.learners} learners; a step takes {span(plan.step_s)}"
    )
    console.print(
        f"{count(plan.tokens_per_s)} tokens/s, goodput {percent(plan.goodput)}, {money(plan.price_per_hour)} an hour, "
        f"{money(plan.price_per_billion_tokens)} per billion tokens"
    )
    if plan.days is not None:
        total = 24 * plan.days * plan.price_per_hour
        console.print(f"{count(regions.model.tokens)} tokens take {plan.days:.3g} days and cost {money(total)}")
    sites = table("sites", "site", "learners", "machines each", "relay", "goodput", "tokens/s", "per billion", words=1)
    for site in plan.sites:
        numbers = (str(site.learners), str(site.machines_per_learner), "yes" if site.relay else "no")
        figures = (percent(site.goodput), count(site.tokens_per_s), money(site.price_per_billion_tokens))
        sites.add_row(site.site, *numbers, *figures)
    console.print(sites)
    if plan.links:
        console.print(_links(regions, plan))
    for line in remarks(plan):
        console.print(line, soft_wrap=True)
    console.print(f"\nWhat sites do not say of their machines: {provenance}.", soft_wrap=True)
    console.print("\nStart it:", style="bold")
    for line in commands:
        console.print(f"  {line}", soft_wrap=True, markup=False, style="dim" if line.startswith("#") else "")


def _links(regions: Regions, plan: Plan) -> Any:
    made = table(f"links to {regions.home}", "site", "up", "down", "of the link", "a day", "away", words=1)
    for link in plan.links:
        rates = (f"{significant(rate)} Gbit/s" for rate in (link.up_gbit_s, link.down_gbit_s))
        day = f"{count(link.gigabytes_per_day)} GB" + (f", {money(link.price_per_day)}" if link.price_per_day else "")
        made.add_row(link.site, *rates, f"{100 * ROOM * link.share:.0f} %", day, f"{link.away_steps:.2g} steps")
    return made


def remarks(plan: Plan) -> Iterator[str]:
    """What a reader should know before money is spent."""
    for link in plan.links:
        if not link.carried:
            yield (
                f"The link of {link.site} carries none of what is known here: nobody waits, but fragments of its "
                f"learners are synced every {link.effective_h:.0f} steps instead of {plan.sync_every}. Widen it, or "
                "leave that site out."
            )
    if plan.sync_every > FIRST_H:
        yield f"H = {plan.sync_every} costs loss: a wider link, or fewer parameters, would allow {FIRST_H}."
    worst = max((link.away_steps for link in plan.links), default=0.0)
    if worst > 0.05 * plan.sync_every:
        share = percent(min(1.0, worst / plan.sync_every))
        yield (
            f"adopt = overwrite would drop up to {share} of the steps of a site that far away; carry, the default, "
            "drops none."
        )


def money(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or not math.isfinite(value) else f"{value:.2f}"
