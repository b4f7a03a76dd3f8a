"""Where a learner stands in its run, out of a cut and back into the shared memory, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.learner.same import capture, same
from tests.learner.small import boxed

from atoll.learner.saved_state import RunPlace, describe_place, fill_box, settings_of
from atoll.learner.snapshot import read, write
from atoll.learner.state import restore
from atoll.mailbox.box import Mailbox
from atoll.protocol.messages import TensorSpec
from atoll.protocol.settings import Settings

PARAMETERS = {"one": torch.arange(5.0), "two": torch.ones(2, 3)}
TENSORS = (TensorSpec("one", (5,), "float32"), TensorSpec("two", (2, 3), "float32"))
FEED = {"ranges": [], "at": 3, "newest": 7, "position": 40, "over": False}


def standing() -> tuple[Mailbox, Settings]:
    """A learner in the middle of a run."""
    box, settings = boxed(PARAMETERS, fragments=2)
    dice = np.random.default_rng(3)
    for fragment in range(2):
        box.base(fragment)[:] = dice.standard_normal(box.base(fragment).size)
    box.steps[:], box.tokens[:], box.dropped[:] = [3, 1], [24, 8], [16, 0]
    box.adopted[:], box.base_version[:] = [5, 4], [5, 4]
    box.run = "r1"
    box.set_count("incarnation", 2)
    return box, settings


def described(box: Mailbox, settings: Settings, **changes: Any) -> RunPlace:
    given = {"name": "learner-1", "session": "s1", "index": 1, "t": 12, "total": 96, "feed": FEED}
    return describe_place(box, settings, TENSORS, **{**given, **changes})


def empty() -> Mailbox:
    return boxed(PARAMETERS, fragments=2)[0]


def header(box: Mailbox) -> dict[str, list[int]]:
    return {name: getattr(box, name).tolist() for name in ("steps", "tokens", "dropped", "adopted", "base_version")}


def test_put_back_the_shared_memory_is_as_it_was() -> None:
    box, settings = standing()
    again = empty()
    fill_box(again, described(box, settings).state)
    assert header(again) == header(box)
    assert (again.run, again.count("incarnation")) == ("r1", 2)
    for fragment in range(2):
        assert again.base(fragment).tobytes() == box.base(fragment).tobytes()


def test_what_is_kept_beside_the_memory_is_what_was_given() -> None:
    box, settings = standing()
    state = described(box, settings).state
    assert (state["learner"], state["session"], state["t"], state["total"]) == ("learner-1", "s1", 12, 96)
    assert state["feed"] == FEED
    assert settings_of(state) == settings
    assert msgspec.convert(state["tensors"], tuple[TensorSpec, ...]) == TENSORS


def test_a_new_run_goes_on_under_its_own_name() -> None:
    box, settings = standing()
    again = empty()
    fill_box(again, described(box, settings).state, run="r2")
    assert again.run == "r2" and header(again) == header(box)


def test_a_base_that_was_half_written_has_no_version_and_is_fetched_again() -> None:
    box, settings = standing()
    box.base_version[1] = -1
    again = empty()
    fill_box(again, described(box, settings).state)
    assert again.base_version.tolist() == [5, -1] and again.adopted.tolist() == [5, 4]


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.0, 1e-45])
def test_odd_numbers_survive(value: float) -> None:
    box, settings = standing()
    box.base(0)[0] = value
    again = empty()
    fill_box(again, described(box, settings).state)
    assert again.base(0).tobytes() == box.base(0).tobytes()


def test_it_travels_through_a_file_with_the_rest_of_the_state(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    box, settings = standing()
    place = described(box, settings)
    write(tmp_path / "cut.safetensors", capture(model, None, {"place": place}))
    found = RunPlace({})
    restore(model, None, {"place": found}, read(tmp_path / "cut.safetensors"), rng=False)
    assert same(found.state["base"], place.state["base"])
    assert settings_of(found.state) == settings and found.state["feed"] == FEED
    again = empty()
    fill_box(again, found.state)
    assert header(again) == header(box) and again.base(1).tobytes() == box.base(1).tobytes()


def test_a_snapshot_of_it_does_not_follow_what_the_run_does_next(tmp_path: Path) -> None:
    box, settings = standing()
    as_it_was = box.base(0).copy()
    snapshot = capture(torch.nn.Linear(2, 2), None, {"place": described(box, settings)})
    box.base(0)[:] = 99.0
    box.steps[:] = 99
    write(tmp_path / "cut.safetensors", snapshot)
    found = RunPlace({})
    restore(torch.nn.Linear(2, 2), None, {"place": found}, read(tmp_path / "cut.safetensors"), rng=False)
    assert found.state["base"][0].numpy().tobytes() == as_it_was.tobytes()
    assert found.state["steps"] == [3, 1]


def test_it_is_a_state_like_any_other() -> None:
    place = RunPlace({"t": 1})
    assert place.state_dict() == {"t": 1}
    place.load_state_dict({"t": 2})
    assert place.state == {"t": 2}
