"""What the settings become once the model is known, and what they refuse."""

from __future__ import annotations

import msgspec
import pytest

from atoll.protocol.errors import ConfigError
from atoll.protocol.settings import Settings


@pytest.mark.parametrize(
    ("asked", "tensors", "p", "h"),
    [
        ({}, 100, 24, 24),
        ({}, 15, 15, 24),  # fewer tensors do not mean more syncs
        ({}, 1, 1, 24),
        ({"overlap": 40}, 15, 15, 41),  # H stays above τ
        ({"fragments": 1}, 100, 1, 24),  # fewer fragments do not mean more syncs
        ({"fragments": 1, "overlap": 0}, 15, 1, 24),
        ({"sync_every": 10}, 15, 10, 10),
        ({"sync_every": 50}, 15, 15, 50),
        ({"fragments": 30}, 100, 30, 30),
        ({"sync_every": 10}, 100, 10, 10),
        ({"fragments": 4, "sync_every": 50}, 100, 4, 50),
    ],
)
def test_p_and_h_follow_from_the_model(asked: dict[str, int], tensors: int, p: int, h: int) -> None:
    settings = Settings(**asked).resolved(tensors)  # type: ignore[arg-type]
    assert (settings.fragments, settings.sync_every) == (p, h)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"quorum": 5}, "quorum = 5 can never be reached by 4 learners: set quorum to 4 or less"),
        ({"blend": 1.5}, "blend = 1.5 is not between 0 and 1"),
        ({"learners": 0}, "learners = 0 is too small: the least is 1"),
        ({"heartbeat_s": 0.0}, "heartbeat_s = 0.0 must be above 0 seconds"),
        ({"lost_after_s": 1.5}, "is under two heartbeats"),
    ],
)
def test_what_cannot_be_is_refused_with_the_fix(asked: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Settings(**asked)  # type: ignore[arg-type]


def test_an_overlap_that_outlasts_h_is_refused() -> None:
    with pytest.raises(ConfigError, match="set overlap to 3 or less"):
        Settings(sync_every=4, fragments=4, overlap=4).resolved(10)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({}, "carry"),
        ({"synchronous": True}, "overwrite"),
        ({"adopt": "overwrite"}, "overwrite"),
        ({"adopt": "carry", "synchronous": True}, "carry"),
    ],
)
def test_adoption_that_is_not_set_is_carry_and_overwrite_in_a_synchronous_run(
    settings: dict[str, object], rule: str
) -> None:
    asked = msgspec.convert({**settings, "steps": 100, "phases": [{"until": 0.5}]}, Settings)
    resolved = asked.resolved(24)
    assert resolved.adopt == rule and resolved.adopts == {rule}, "phases too know it by name"
    assert resolved.resolved(24) == resolved
