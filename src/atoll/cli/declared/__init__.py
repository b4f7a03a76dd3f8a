"""Every command of `atoll`, with its options and its help. Importing this brings none of the code that runs them."""

from __future__ import annotations

from atoll import __version__
from atoll.cli.command import Command, flag
from atoll.cli.declared.look import LOOKING
from atoll.cli.declared.runs import RUNS
from atoll.cli.declared.shared import ASK, PANELS
from atoll.cli.declared.simulate import SIMULATORS

SIMULATE = Command(
    "simulate", ASK, "The protocol in virtual time: what would happen, in seconds.", "", commands=SIMULATORS
)
ATOLL = Command(
    "atoll",
    "",
    "Train one model on many unreliable machines.",
    "",
    (flag("--version", "Print the version.", shows=lambda: f"atoll {__version__}"),),
    commands=tuple(sorted((*RUNS, *LOOKING, SIMULATE), key=lambda one: PANELS.index(one.panel))),
    elsewhere=(("resume", "train --resume"), ("run", "train"), ("join", "learn"), ("list", "ls")),
)
