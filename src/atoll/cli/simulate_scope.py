"""`atoll simulate scope`: every order of things for a few learners and faults."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from atoll.cli.simulate import simulate
from atoll.protocol.errors import ConfigError
from atoll.simulate.scope import SCOPES, Found, Scope, search

States = Annotated[int, typer.Option("--states", help="Distinct states to enter in every scope.")]
Depth = Annotated[int, typer.Option("--depth", help="Choices to go from its start, or departures in a deep scope.")]
Only = Annotated[str, typer.Option("--scope", help="Only scopes whose name contains this.")]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]


@simulate.command()
def scope(states: States = 10_000, depth: Depth = 50, only: Only = "", json_: Json = False) -> None:
    """Try every order in which things can happen to a few learners, and check the rules in every state.

    One syncer, two or three learners, two fragments, up to three faults. States that differ only in clock values count
    once. Exit code 0: no rule is broken. 1: one is; then the shortest way to it is told.

    Examples:

      atoll simulate scope --states 20000

      atoll simulate scope --scope "three learners" --depth 4
    """
    chosen = [one for one in SCOPES if only in one.name]
    if not chosen or states < 1 or depth < 1:
        names = ", ".join(repr(one.name) for one in SCOPES)
        raise ConfigError(f"nothing to search: take --states and --depth above 0 and a --scope out of {names}")
    began, console, known = time.perf_counter(), Console(stderr=True), set[bytes]()
    found = [_search(console, one, depth, states, known) for one in chosen]
    broken = [one for one in found if one.violation is not None]
    seconds = time.perf_counter() - began
    if json_:
        print(msgspec.json.encode(_document(found, len(known), seconds)).decode())
    else:
        for one in found:
            print(one)
        verdict = "no rule is broken" if not broken else f"{len(broken)} scopes break a rule"
        print(f"{len(known):,} distinct states in {seconds:.1f} s: {verdict}")
    for one in broken:
        assert one.violation is not None
        console.print("\n".join(one.violation.story), soft_wrap=True, highlight=False, markup=False)
    if broken:
        raise typer.Exit(1)


def _search(console: Console, one: Scope, depth: int, states: int, known: set[bytes]) -> Found:
    with console.status(one.name) as status:

        def progress(entered: int, reached: int) -> None:
            if entered % 100 == 0:
                status.update(f"{one.name}: {entered:,} of {states:,} states, depth {reached}")

        return search(one, depth=depth, states=states, known=known, progress=progress)


def _document(found: list[Found], states: int, seconds: float) -> dict[str, Any]:
    return {"states": states, "seconds": round(seconds, 3), "scopes": found}
