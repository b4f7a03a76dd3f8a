"""The command line. Every command says what it does with an example; a user's mistake is one line, not a traceback."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from atoll import __version__
from atoll.cli import commands
from atoll.protocol.errors import AtollError

__all__ = ["main"]


@commands.app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"atoll {__version__}")
        raise typer.Exit


def main() -> None:
    try:
        commands.app()
    except AtollError as error:
        print(f"atoll: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
