"""The application, and which commands there are. A command's module is imported when it is called: `atoll --help` needs
none of them, and with them would bring numba, NumPy and the network along (2 s of processor time instead of 0.4).

`COMMANDS` is what `atoll --help` shows; a test holds its sentences against the commands' own. Help shows flags without
a type, options of `atoll train` and `atoll syncer` with the defaults of the settings, and `-- ARGS` where a script is
run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

TRAIN, JOIN, LOOK, TRUST, ASK = (
    "Train",
    "Run by hand, and over machines",
    "Look at a run",
    "Check, repeat and attack",
    "Before you begin",
)
SETTING_COMMANDS = ("train", "syncer")
"""Their options are settings: what is not given is what `Config` says."""


@dataclass(frozen=True, slots=True)
class CommandEntry:
    panel: str
    summary: str
    """The first sentence of the command's own help."""
    modules: tuple[str, ...]


COMMANDS = {
    "train": CommandEntry(TRAIN, "Train a model with M learners and a syncer on this machine.", ("train",)),
    "export": CommandEntry(
        TRAIN, "Write the weights of a run as safetensors, also while it runs or after a kill.", ("look",)
    ),
    "ls": CommandEntry(LOOK, "List the runs here, and whether they are alive.", ("runs",)),
    "status": CommandEntry(LOOK, "See how a run is doing; of one that is over, what came of it.", ("look",)),
    "logs": CommandEntry(LOOK, "Print what the processes of a run wrote.", ("runs",)),
    "report": CommandEntry(LOOK, "Write one page about a run: figures, timeline, losses, faults, ledger.", ("report",)),
    "dashboard": CommandEntry(LOOK, "Print a link that opens the dashboard of a run in one browser.", ("look",)),
    "syncer": CommandEntry(JOIN, "Start a syncer by hand; learners join with `atoll learn`.", ("serve",)),
    "learn": CommandEntry(JOIN, "Run a script as one learner of a run that somebody else started.", ("serve",)),
    "drain": CommandEntry(JOIN, "Let one learner leave without loss.", ("look",)),
    "set": CommandEntry(JOIN, "Change settings of a run while it goes on; they are journaled.", ("look",)),
    "cert": CommandEntry(
        JOIN, "Make what a run needs to leave this machine: a certificate and a first token.", ("cert",)
    ),
    "tokens": CommandEntry(JOIN, "Who may join a run: list, add, revoke, while it goes on.", ("keys",)),
    "verify": CommandEntry(TRUST, "Check a run from its files alone.", ("look",)),
    "replay": CommandEntry(
        TRUST, "Run it again from its tape on this machine, and compare every version.", ("replay",)
    ),
    "chaos": CommandEntry(TRUST, "Attack a real run by a plan of faults, and get a verdict in numbers.", ("chaos",)),
    "compare": CommandEntry(
        TRUST, "Run several methods under the same plan of faults, and see what is left of each.", ("compare",)
    ),
    "doctor": CommandEntry(
        ASK, "Say what would go wrong here: Python, torch, kernels, memory, disk, network, clock.", ("doctor",)
    ),
    "simulate": CommandEntry(
        ASK,
        "The protocol in virtual time: what would happen, in seconds.",
        (
            "simulate",
            "simulate_bandwidth",
            "simulate_calibrate",
            "simulate_goodput",
            "simulate_upsizing",
            "tape",
        ),
    ),
}


class Command(TyperCommand):
    """A command whose help says what a newcomer asks."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for param in params:
            _hide_type_of_flag(param)
        if self.name in SETTING_COMMANDS:
            _show_settings(params)
        return params

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces: list[str] = super().collect_usage_pieces(ctx)
        return [*pieces, "[-- ARGS]..."] if ctx.allow_extra_args else pieces


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for param in params:
            _hide_type_of_flag(param)
        return params


class AllCommands(Group):
    """What is listed are only names and sentences; the one that is called is the real one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.imported = dict(self.commands)
        self.commands = {
            name: Command(name, help=entry.summary, rich_help_panel=entry.panel) for name, entry in COMMANDS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = import_command(args[0])
        return super().resolve_command(ctx, args)


class App(typer.Typer):
    """Typer, with commands and groups of ours."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"cls": Group, "context_settings": {"help_option_names": ["-h", "--help"]}, **options})

    def command(self, *args: Any, **options: Any) -> Callable[[Any], Any]:
        return super().command(*args, **{"cls": Command, **options})


app = App(
    name="atoll",
    cls=AllCommands,
    help="Train one model on many unreliable islands of compute.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def import_command(name: str) -> Any:
    """Its modules register it with the application."""
    for module in COMMANDS[name].modules:
        import_module(f"atoll.cli.{module}")
    group = get_command(app)
    assert isinstance(group, AllCommands)
    return group.imported[name]


def _hide_type_of_flag(param: Any) -> None:
    if getattr(param, "is_flag", False):
        param.metavar = ""


def _show_settings(params: list[Any]) -> None:
    """Options that are not given are as the settings say."""
    from atoll.cli.defaults import setting_defaults

    defaults = setting_defaults()
    for param in params:
        if param.default is None and param.name in defaults:
            param.show_default = defaults[param.name]
