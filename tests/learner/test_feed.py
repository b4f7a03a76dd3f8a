"""Where a learner's batches come from: leases, its own order, and the ways between the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from atoll.learner.data import Drawn, Feed, NamedDataset, collect
from atoll.numerics.permutation import permuted
from atoll.protocol.errors import ConfigError
from atoll.protocol.learner.effects import Registered
from atoll.protocol.messages import Range

TEXT = torch.arange(100)
CODE = torch.arange(1000, 1040)


def samples(start: int, stop: int, seed: int = 7) -> list[int]:
    """Of the first pass over TEXT."""
    positions = np.arange(start, stop, dtype=np.int64)
    return [int(one) for one in permuted(positions, length=len(TEXT), seed=seed, dataset=0, epoch=0)]


def nobody_waits(seconds: float) -> None:
    raise AssertionError("training does not wait here")


def collected(found: tuple[NamedDataset, ...], draws: Iterator[Drawn]) -> Iterator[Any]:
    return (collect(found[dataset].samples, indices) for dataset, indices in draws)


class Script:
    """A training loop that takes batches of four, and steps on each."""

    def __init__(self, **data: torch.Tensor) -> None:
        self.feed = Feed(seed=7, name="learner-0")
        self.found = self.feed.open(data or {"data": TEXT}, 4, None)
        self.done = False
        self.waits: list[float] = []
        self.meanwhile: Callable[[], None] = lambda: None
        """What happens while it waits."""

    def begin(self, patience_s: float = 60.0, epochs: int = 0) -> Script:
        self.asked = self.feed.ask(self.found, 4, epochs, seed=7)
        draws = self.feed.draw_leased(self.found, 4, lambda: self.done, self._wait, patience_s)
        self._batches = collected(self.found, draws)
        return self

    def _wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        assert len(self.waits) < 100, "it waits for ever"
        self.meanwhile()

    def add_leases(self, *ranges: Range, over: bool = False, own: str = "") -> Script:
        self.feed.take_leases(ranges, over, own)
        return self

    def take(self, batches: int) -> list[list[int]]:
        taken = []
        for batch in islice(self._batches, batches):
            taken.append(batch.tolist())
            self.feed.stepped()
        return taken


# ---- asking ----------------------------------------------------------------------------------------------------------


def test_the_syncer_is_told_of_the_data_and_the_batch() -> None:
    feed = Feed(seed=0, name="learner-0")
    found = feed.open({"text": TEXT, "code": CODE}, 8, {"code": 3.0})
    asked = feed.ask(found, 8, epochs=2, seed=7)
    assert asked == Registered((("text", 100, 1.0), ("code", 40, 3.0)), 2, 8)
    assert feed.registered == asked, "for a courier that takes over"


def test_data_that_does_not_fill_a_batch_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="the dataset has 40 samples, fewer than one batch of 64"):
        Feed(seed=0, name="learner-0").open({"text": TEXT, "code": CODE}, 64, None)


def test_before_data_is_leased_there_is_no_position() -> None:
    script = Script()
    assert script.feed.position == -1
    script.feed.stepped()
    script.feed.take_leases((Range(0, 0, 0, 0, 8),), False, "")
    assert script.feed.position == -1
    script.begin()
    assert script.feed.position == 0


# ---- leases ----------------------------------------------------------------------------------------------------------


def test_batches_are_what_was_leased_in_that_order() -> None:
    script = Script().begin().add_leases(Range(0, 0, 0, 0, 8), Range(1, 0, 0, 40, 44))
    assert script.take(3) == [samples(0, 4), samples(4, 8), samples(40, 44)]
    assert script.feed.position == 12 and script.waits == []


def test_before_the_first_batch_it_waits_for_its_first_lease() -> None:
    script = Script().begin()

    def late() -> None:
        if len(script.waits) == 3:
            script.add_leases(Range(0, 0, 0, 0, 8))

    script.meanwhile = late
    assert script.take(1) == [samples(0, 4)]
    assert len(script.waits) == 3 and all(0 < seconds <= 0.5 for seconds in script.waits)


def test_later_it_never_waits_when_leases_do_not_come_the_last_is_gone_through_again() -> None:
    script = Script().begin().add_leases(Range(0, 0, 0, 0, 8))
    script.meanwhile = lambda: nobody_waits(0)
    assert script.take(5) == [samples(0, 4), samples(4, 8)] * 2 + [samples(0, 4)]
    assert script.feed.position == 8, "what is taken again is not leased"
    script.add_leases(Range(1, 0, 0, 8, 12))
    assert script.take(1) == [samples(8, 12)] and script.feed.position == 12


def test_a_loader_that_draws_further_ahead_than_is_leased_is_told_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script().begin().add_leases(Range(0, 0, 0, 0, 100), Range(1, 0, 1, 0, 100), Range(2, 0, 2, 0, 100))
    draws = script.feed.draw_leased(script.found, 4, lambda: False, nobody_waits, 60.0)
    assert len(list(islice(draws, 80))) == 80
    said = capsys.readouterr().err
    assert said.count("draws 75 batches ahead of the steps on them, more than are leased") == said.count("\n") == 1
    script.add_leases(Range(3, 0, 3, 0, 100))
    script.take(30)
    assert capsys.readouterr().err == "", "leases that come late are nobody's mistake"


def test_at_the_end_of_the_data_the_batches_end() -> None:
    script = Script().begin().add_leases(Range(0, 0, 0, 0, 6), over=True)
    assert script.take(10) == [samples(0, 4), samples(4, 6)]
    assert script.feed.position == 6


def test_one_that_comes_when_the_data_is_used_up_has_no_batch() -> None:
    script = Script().begin().add_leases(over=True)
    assert script.take(1) == [] and script.waits == []


def test_when_the_run_is_done_the_batches_end() -> None:
    script = Script().begin().add_leases(Range(0, 0, 0, 0, 40))
    assert len(script.take(2)) == 2
    script.done = True
    assert script.take(5) == []


def test_a_run_that_ends_while_the_first_lease_is_awaited_ends_the_wait() -> None:
    script = Script().begin()

    def end() -> None:
        script.done = True

    script.meanwhile = end
    assert script.take(5) == [] and len(script.waits) == 1


def test_samples_count_when_their_step_is_done() -> None:
    script = Script().begin().add_leases(Range(0, 0, 0, 0, 40))
    batches = script.feed.draw_leased(script.found, 4, lambda: False, nobody_waits, 60.0)
    next(batches)
    next(batches)
    assert script.feed.position == 0
    script.feed.stepped()
    assert script.feed.position == 8


def test_several_datasets_come_as_they_were_leased() -> None:
    script = Script(text=TEXT, code=CODE).begin().add_leases(Range(0, 1, 0, 0, 4), Range(1, 0, 0, 0, 4))
    first, second = script.take(2)
    assert min(first) >= 1000 and second == samples(0, 4)


# ---- its own order ---------------------------------------------------------------------------------------------------


def own(feed: Feed, found: tuple[NamedDataset, ...], passes: int | None = 1, incarnation: int = 1) -> Iterator[Any]:
    return collected(found, feed.draw_own(found, 4, lambda: False, incarnation=incarnation, passes=passes))


def test_one_whose_data_is_not_the_runs_is_told_why_and_trains_on_it_in_its_own_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = Script().begin().add_leases(own="dataset 'text' is 7 samples here")
    batches = script.take(50)
    assert sorted(sample for batch in batches[:25] for sample in batch) == TEXT.tolist(), "a whole pass"
    assert script.feed.position == -1 and script.feed.registered is None
    said = capsys.readouterr().err
    assert "its own, counted but not leased: dataset 'text' is 7 samples here" in said


def test_when_no_lease_comes_in_time_it_goes_on_in_its_own_order(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script().begin(patience_s=0.0)
    assert len(script.take(3)) == 3
    assert script.waits == [] and script.feed.position == -1
    assert "no data was leased by the syncer" in capsys.readouterr().err
    script.add_leases(Range(0, 0, 0, 0, 8))
    assert script.feed.position == -1, "and stays with it"


def test_its_own_order_goes_through_every_dataset_in_turn() -> None:
    feed = Feed(seed=7, name="learner-0")
    found = feed.open({"text": TEXT[:8], "code": CODE[:12]}, 4, None)
    batches = [batch.tolist() for batch in own(feed, found)]
    assert [min(batch) >= 1000 for batch in batches] == [False, True, False, True, True]
    assert sorted(sample for batch in batches for sample in batch) == [*TEXT[:8].tolist(), *CODE[:12].tolist()], (
        "each once"
    )


def test_its_own_order_is_its_own() -> None:
    def first(seed: int, name: str, incarnation: int = 1) -> list[int]:
        feed = Feed(seed=seed, name=name)
        batch = next(own(feed, feed.open(TEXT, 4, None), incarnation=incarnation))
        return [int(one) for one in batch]

    assert first(7, "learner-0") == first(7, "learner-0")
    others = [first(8, "learner-0"), first(7, "learner-1"), first(7, "learner-0", 2)]
    assert all(other != first(7, "learner-0") for other in others)


def test_alone_it_knows_how_much_of_the_pass_is_done() -> None:
    feed = Feed(seed=7, name="learner-0")
    found = feed.open({"text": TEXT[:8], "code": CODE[:12]}, 4, None)
    shares = []
    for _ in own(feed, found):
        shares.append(feed.passed)
        feed.stepped()
    assert [*shares, feed.passed] == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0]), "and all of it after the last step"


# ---- other lives, cuts, loops ----------------------------------------------------------------------------------------


def test_in_another_life_its_position_begins_anew() -> None:
    script = Script().begin().add_leases(Range(3, 0, 0, 0, 40))
    script.take(3)
    script.feed.forget()
    assert script.feed.position == 0
    script.add_leases(Range(9, 0, 0, 60, 64))
    assert script.take(1) == [samples(60, 64)] and script.feed.position == 4


def test_out_of_a_cut_it_goes_on_with_the_next_sample() -> None:
    straight = Script().begin().add_leases(Range(3, 0, 0, 0, 40))
    straight.take(3)
    again = Script()
    again.feed.load(straight.feed.state())
    again.begin()
    assert again.feed.position == straight.feed.position == 12
    again.add_leases(Range(3, 0, 0, 0, 40))
    assert again.take(7) == straight.take(7)
    assert again.waits == [], "what it holds it need not be told again"


def test_a_cut_of_one_without_leases_carries_nothing() -> None:
    script = Script()
    assert script.feed.state() == {}
    script.feed.load({})
    assert script.begin().feed.position == 0


def test_a_second_loop_over_the_batches_goes_on_where_the_first_was_left() -> None:
    script = Script().begin().add_leases(Range(0, 0, 0, 0, 40))
    script.take(2)
    script.begin()
    assert script.feed.position == 8
    assert script.take(2) == [samples(8, 12), samples(12, 16)]
    assert script.waits == []


def test_a_second_loop_may_take_larger_batches() -> None:
    script = Script().begin().add_leases(Range(0, 0, 0, 0, 40))
    script.take(1)
    asked = script.feed.ask(script.found, 6, 0, seed=7)
    assert asked.batch == 6
    batches = collected(script.found, script.feed.draw_leased(script.found, 6, lambda: False, nobody_waits, 60.0))
    assert next(batches).tolist() == samples(4, 10)


def test_a_second_loop_does_not_take_the_cut_up_once_more() -> None:
    before = Script().begin().add_leases(Range(0, 0, 0, 0, 40))
    before.take(2)
    script = Script()
    script.feed.load(before.feed.state())
    script.begin().take(3)
    script.begin()
    assert script.feed.position == 20 and script.take(1) == [samples(20, 24)]
