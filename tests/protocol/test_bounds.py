"""Nothing that a peer says may be as long or as large as it likes: the types themselves are asked."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from msgspec import inspect

from atoll.fabric.wire import ScoreReport
from atoll.protocol.errors import ConfigError
from atoll.protocol.limits import LINE, clipped, near
from atoll.protocol.messages import FromLearner, FromSyncer
from atoll.protocol.settings import Settings
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


def is_between(kind: inspect.IntType | inspect.FloatType) -> bool:
    return (kind.ge, kind.gt) != (None, None) and (kind.le, kind.lt) != (None, None)


def unbounded(kind: inspect.Type, path: str, seen: set[type] | None = None) -> Iterator[str]:
    """Every place in a type where a value has no bound."""
    seen = set() if seen is None else seen
    if isinstance(kind, LONG) and kind.max_length is None:
        yield path
    if isinstance(kind, inspect.IntType | inspect.FloatType) and not is_between(kind):
        yield path
    match kind:
        case inspect.StructType(cls, fields):
            if cls not in seen and cls is not Settings:  # those check themselves, wherever they come from
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


@pytest.mark.parametrize(
    "said", [FromLearner, FromSyncer, AnyEntry, ScoreReport], ids=["learner", "syncer", "tape", "score"]
)
def test_whatever_may_be_long_or_large_has_a_bound_in_its_type(said: type) -> None:
    assert list(unbounded(inspect.type_info(said), "")) == []


def test_the_walk_finds_what_has_none() -> None:
    parts = ["Whole.parts", "Part.name", "Part.shape", "one of Part.shape", "one of Whole.parts[1]"]
    places = [*parts, "Whole.clock", "a key of Whole.clock", "a value of Whole.clock", "Whole.note[0]"]
    assert list(unbounded(inspect.type_info(Whole), "")) == places


@pytest.mark.parametrize("value", [2**63, 10**400, -(2**48), float("nan"), float("inf"), 1e300])
def test_no_setting_is_beyond_all_measure(value: float) -> None:
    for name in ("steps", "tokens", "patience_s", "weight_limit", "grace_cap_steps"):
        if isinstance(value, int) or not isinstance(getattr(Settings(), name), int):
            with pytest.raises(ConfigError):
                Settings(**{name: value})


def test_a_loss_that_may_not_be_sent_is_none() -> None:
    assert near(1.5) == 1.5 and near(None) is None
    assert [near(loss) for loss in (float("nan"), float("inf"), -1e30, 1e38)] == [None] * 4


def test_a_text_is_clipped_to_what_may_be_kept() -> None:
    assert clipped("x" * LINE) == "x" * LINE
    assert clipped("x" * (LINE + 1)) == "x" * (LINE - 1) + "…"
    assert clipped("abcdef", 3) == "ab…"
