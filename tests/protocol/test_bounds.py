"""Nothing that a peer says may be as long as it likes: the types themselves are asked."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from msgspec import inspect

from atoll.fabric.wire import Score
from atoll.protocol.bounds import LINE, clipped
from atoll.protocol.messages import FromLearner, FromSyncer
from atoll.protocol.tape import AnyEntry

LONG = inspect.StrType | inspect.BytesType | inspect.CollectionType | inspect.DictType
"""Types of which a value may be long; tuples of a fixed length are none of them."""


class Part(msgspec.Struct):
    name: str
    shape: tuple[int, ...] = ()


class Whole(msgspec.Struct):
    parts: tuple[tuple[Part, int], ...]
    clock: dict[str, int]
    note: str | None = None


def unbounded(kind: inspect.Type, path: str, seen: set[type] | None = None) -> Iterator[str]:
    """Every place in a type where a value has no bound."""
    seen = set() if seen is None else seen
    if isinstance(kind, LONG) and kind.max_length is None:
        yield path
    match kind:
        case inspect.StructType(cls, fields):
            if cls not in seen:
                seen.add(cls)
                for field in fields:
                    yield from unbounded(field.type, f"{cls.__name__}.{field.name}", seen)
        case inspect.UnionType(types) | inspect.TupleType(types):
            for number, one in enumerate(types):
                yield from unbounded(one, f"{path}[{number}]", seen)
        case inspect.DictType(key, value):
            yield from unbounded(key, f"a key of {path}", seen)
            yield from unbounded(value, f"a value of {path}", seen)
        case inspect.CollectionType(item):
            yield from unbounded(item, f"one of {path}", seen)
        case inspect.AnyType() | inspect.RawType() | inspect.ExtType():
            yield path


@pytest.mark.parametrize("said", [FromLearner, FromSyncer, AnyEntry, Score], ids=["learner", "syncer", "tape", "score"])
def test_whatever_may_be_long_has_a_bound_in_its_type(said: type) -> None:
    assert list(unbounded(inspect.type_info(said), "")) == []


def test_the_walk_finds_what_has_none() -> None:
    places = ["Whole.parts", "Part.name", "Part.shape", "Whole.clock", "a key of Whole.clock", "Whole.note[0]"]
    assert list(unbounded(inspect.type_info(Whole), "")) == places


def test_a_text_is_clipped_to_what_may_be_kept() -> None:
    assert clipped("x" * LINE) == "x" * LINE
    assert clipped("x" * (LINE + 1)) == "x" * (LINE - 1) + "…"
    assert clipped("abcdef", 3) == "ab…"
