"""`atoll doctor`: what would go wrong here."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from atoll.cli.lists import number
from atoll.cli.shared import where
from atoll.fabric.address import SCHEME, SyncerAddress, parse_address
from atoll.observe.doctor import Check, examine
from atoll.observe.figures import plain, table
from atoll.protocol.errors import ConfigError
from atoll.store.keys import read_link

LOOKS = {"ok": ("✓", "green"), "warn": ("!", "bold yellow"), "fail": ("✗", "bold red")}
NAME = 14
"""The longest name of a check."""


def doctor(
    *,
    join: str | None,
    syncer: str | None,
    parameters: str | None,
    step: float | None,
    out: Path,
    json_: bool,
) -> None:
    address, size = _address(join, syncer), number("--parameters", parameters) if parameters is not None else None
    if address is None and (size is not None or step is not None):
        raise ConfigError("--parameters and --step say what a link is to carry: name it by --join LINK or --syncer")
    for option, value in (("--parameters", size), ("--step", step)):
        if value is not None and not value > 0:
            raise ConfigError(f"{option} {value:g} must be above 0")
    console = Console(stderr=json_)
    found: list[Check] = []
    with console.status("looking") as status:

        def announce(what: str) -> None:
            status.update(f"looking at {what}")

        for check in examine(out, address, announce, parameters=size, step_s=step):
            found.append(check)
            if not json_:
                console.print(_row(check))
                _show_needs(console, check)
    counts: Counter[str] = Counter(check.verdict for check in found)
    if json_:
        told = {"ok": not counts["fail"], "checks": [check.document() for check in found]}
        print(msgspec.json.format(msgspec.json.encode(told)).decode())
    else:
        console.print(_closing(counts))
    if counts["fail"]:
        raise SystemExit(1)


def _address(join: str | None, syncer: str | None) -> SyncerAddress | None:
    """A syncer that is named outweighs a link that lies in the environment."""
    if syncer is None and join is None:
        return None
    address = parse_address(where(syncer) if syncer is not None else _read_join(join or ""))
    address.context()  # files that cannot be used are named now
    return address


def _read_join(join: str) -> str:
    if join.startswith(SCHEME):
        return join
    if Path(join).is_dir() or not (link := read_link(join, "--join (or ATOLL_JOIN)")).startswith(SCHEME):
        raise ConfigError(
            "--join takes a join link, atoll://…, or a file that holds one: an address or a folder goes with --syncer"
        )
    return link


def _show_needs(console: Console, check: Check) -> None:
    """What each H and codec would take."""
    if "needs" not in check.figures:
        return
    shown = table("what the link would have to carry", "H", "codec", "up", "down", "of the link", words=0)
    for one in check.figures["needs"]:
        rates = (f"{one[f'{side}_bits_per_s'] / 1e6:,.3g} Mbit/s" for side in ("up", "down"))
        colour = "" if one["carried"] else "dim"
        shown.add_row(str(one["sync_every"]), one["codec"], *rates, f"{one['share']:.2g}x", style=colour)
    console.print(shown)


def _row(check: Check) -> Table:
    """A line for the finding, and one for the next step where there is one."""
    sign, colour = LOOKS[check.verdict]
    row = Table.grid(padding=(0, 1))
    row.add_column(width=1)
    row.add_column(width=NAME, no_wrap=True)
    row.add_column()
    row.add_row(Text(sign, colour), Text(check.name, "dim"), Text(plain(check.value)))
    if check.next:
        row.add_row("", "", Text(f"→ {plain(check.next)}", colour if check.verdict == "fail" else "yellow"))
    return row


def _closing(counts: Counter[str]) -> Text:
    if counts["fail"]:
        return Text(f"{counts['fail']} of {counts.total()} checks fail: a run would not go well here.", "bold red")
    if counts["warn"]:
        return Text(f"Nothing fails; {counts['warn']} of {counts.total()} are worth a look.", "yellow")
    return Text("All is well.", "green")
