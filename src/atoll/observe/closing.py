"""The last words of a run: its figures, its story, what the model writes, where the files are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from atoll.observe.figures import CAUSES, NONE, count, decimal, measure, percent, plain, span
from atoll.observe.screen import WIDEST
from atoll.observe.story import ADVICE, WARNING
from atoll.observe.summary import Summary
from atoll.store.verify import Report

INTERRUPTED = "the operator asked for it"
"""The reason of a run that could go on."""
_SAMPLE = "what the trained model writes"


def print_closing(
    console: Console,
    summary: Summary,
    story: Sequence[str],
    sample: str | None = None,
    out: Path | None = None,
    again: str = "atoll train",
) -> None:
    """`again`: the command that goes on with it."""
    width = min(console.width, WIDEST)
    console.print()
    console.print(_figures(summary, width))
    for sentence in story:
        line = Text(plain(sentence), "yellow" if sentence.startswith((WARNING, ADVICE)) else "")
        console.print(line, width=width, soft_wrap=not console.is_terminal)
    if sample:
        text = Text(plain(sample.strip("\n").expandtabs(4), keep="\n"), "italic")
        console.print()
        console.print(Panel(text, title=_SAMPLE, title_align="left", border_style="magenta", width=width))
    if out is not None:
        console.print()
        files = ", ".join(_files_in(out))
        console.print(Text(f"All of it is in {out}: {files}; on one page: atoll report {out}"), soft_wrap=True)
        if summary["reason"] == INTERRUPTED:
            console.print(Text(f"It goes on with: {again} --resume {out}"), soft_wrap=True)


def _files_in(out: Path) -> list[str]:
    """Those that are worth a look, and are there."""
    logs = out / "logs"
    files = [name for name in ("summary.json", "events.jsonl", "model.safetensors") if (out / name).exists()]
    return [*files, *(["logs/"] if logs.is_dir() and any(logs.iterdir()) else [])]


def _figures(summary: Summary, width: int) -> Table:
    tokens, learners = summary["tokens"], summary["per_learner"]
    facts = [
        ("goodput", percent(summary["goodput"])),
        ("rounds", f"{summary['rounds']:,}"),
        ("uptime", percent(summary["uptime"])),
        ("participation", percent(summary["participation"])),
        ("liveness", percent(summary["liveness"])),
        ("effective H", decimal(summary["effective_h"], 1)),
        ("tokens", count(tokens["computed"])),
        ("its mean, p95", f"{decimal(summary['effective_h_mean'], 1)}, {decimal(summary['effective_h_p95'], 0)}"),
        ("merged share", percent(summary["merged_share"])),
        ("longest gap", span(summary["longest_gap_s"])),
        ("overlap, missed", _dropped(summary)),
        ("median gap", span(summary["median_gap_s"])),
        ("lost", f"{count(tokens['lost'])} tokens"),
        ("kills, restarts", f"{summary['kills']}, {summary['restarts']}"),
        ("bytes per token", decimal(summary["bytes_per_token"], 1)),
        ("refusals", str(summary["refusals"])),
        ("steps", f"{sum(learner['steps'] for learner in learners.values()):,}"),
        ("validation", _course(summary["validation_loss_start"], summary["validation_loss_end"])),
        ("training loss", _course(summary["training_loss_start"], summary["training_loss_end"])),
        *((plain(name), _course(one["start"], one["end"])) for name, one in summary["metrics"].items()),
    ]
    facts += [("", "")] * (len(facts) % 2)
    title = f"{summary['run'] or 'the run'}, {span(summary['wall_s'])}"
    table = Table(box=box.ROUNDED, title=plain(title), title_justify="left", show_header=False, width=min(width, 80))
    beside = 2 if width >= 76 else 1
    for _ in range(beside):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(ratio=1, justify="right", no_wrap=True)
    for first in range(0, len(facts), beside):
        table.add_row(*(cell for fact in facts[first : first + beside] for cell in fact))
    return table


def _dropped(summary: Summary) -> str:
    """By overlap and in missed rounds."""
    causes, computed = summary["tokens"].get("dropped_by_cause"), summary["tokens"]["computed"]
    if not causes or not computed:
        return NONE
    return ", ".join(percent(causes[name] / computed) for name in ("overlap", "missed"))


def _course(start: float | None, end: float | None) -> str:
    return NONE if start is None else f"{measure(start)} → {measure(end)}"


def verification_rows(report: Report) -> list[tuple[str, str]]:
    """What `atoll verify` counted, as a short table."""
    facts = report.facts
    fates = [f"{count(tokens)} {fate.replace('_', ' ')}" for fate, tokens in facts["tokens"].items()]
    causes = [f"{count(tokens)} {CAUSES[cause]}" for cause, tokens in facts["dropped_by_cause"].items()]
    shares = [f"{name} {percent(one['merged_share'])}" for name, one in facts["per_learner"].items()]
    return [
        ("run", facts["run"] or "has not begun"),
        ("records", f"{facts['records']:,} of {facts['terms']} terms"),
        ("rounds", f"{facts['rounds']:,}, {facts['passed']:,} of them passed over"),
        ("contributions", f"{facts['contributions']:,} of {facts['learners']:,} learners"),
        ("tokens", ", ".join(fates) or "none"),
        ("not merged", ", ".join(causes) or "none"),
        ("merged share", ", ".join(shares) or "none"),
        ("cuts", ", ".join(map(str, facts["cuts"])) or "none"),
        ("made again", f"{facts['rebuilt_rounds']:,} rounds, bit for bit"),
        ("took", span(facts["seconds"])),
    ]
