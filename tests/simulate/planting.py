"""How a bug is planted: a function of the protocol is replaced for as long as `planted` is open, in tests only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from atoll.simulate.campaign import WorldKind

Plain = Callable[..., Any]
Make = Callable[[Plain], Any]
"""From the plain function to the mutant of it."""


@dataclass(frozen=True)
class Mutant:
    name: str
    places: tuple[tuple[Any, str, Make], ...]
    """Class or module, the name in it, and what makes the mutant."""
    kind: WorldKind = "plain"
    """Of the worlds in which it can be seen."""


MUTANTS: dict[str, Mutant] = {}


def mutant(name: str, *places: tuple[Any, str, Make], kind: WorldKind = "plain") -> None:
    assert name not in MUTANTS, name
    MUTANTS[name] = Mutant(name, places, kind)


@contextmanager
def planted(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for where, what, make in MUTANTS[name].places:
            stack.enter_context(patch.object(where, what, make(getattr(where, what))))
        yield


def always(answer: Any) -> Make:
    """A function that forgot what to look at."""
    return lambda plain: lambda *args, **kwargs: answer


def nothing(plain: Plain) -> Any:
    """A call that was left out."""
    return always(None)(plain)


def without(change: Callable[[Any], Any]) -> Make:
    """A method that, once it is done, has something undone: what its author forgot."""

    def make(plain: Plain) -> Any:
        def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
            answer = plain(self, *args, **kwargs)
            change(self)
            return answer

        return broken

    return make
