"""The command line. Every command says what it does with an example; a user's mistake is one line, not a traceback."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from atoll import __version__
from atoll.cli import (  # they register their commands
    cert,
    chaos,
    compare,
    doctor,
    keys,
    look,
    replay,
    report,
    serve,
    simulate,
    simulate_bandwidth,
    simulate_calibrate,
    simulate_goodput,
    simulate_scope,
    simulate_upsizing,
    tape,
    train,
)
from atoll.cli.app import app
from atoll.protocol.errors import AtollError

__all__ = [
    "app",
    "cert",
    "chaos",
    "compare",
    "doctor",
    "keys",
    "look",
    "main",
    "replay",
    "report",
    "serve",
    "simulate",
    "simulate_bandwidth",
    "simulate_calibrate",
    "simulate_goodput",
    "simulate_scope",
    "simulate_upsizing",
    "tape",
    "train",
]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"atoll {__version__}")
        raise typer.Exit


def main() -> None:
    try:
        app()
    except AtollError as error:
        print(f"atoll: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
