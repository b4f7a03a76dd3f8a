from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch
from tests.learner.small import Remembers, boxed

from atoll.learner.boundary import Boundary
from atoll.mailbox.box import Mailbox
from atoll.mailbox.channel import BASE, AdoptOrder, CopyMade, ForgetOrder, HoldOrder, ReadOrder, SlotFreed, VersionTaken
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.effects import Adopted


class SteppedBoundary:
    """Two fragments of one number each: w0 and w1."""

    def __init__(self) -> None:
        self.w = {"w0": torch.tensor([1.0]), "w1": torch.tensor([2.0])}
        self.box, settings = boxed(self.w, 2)
        self.courier = Remembers()
        self.boundary = Boundary(self.box, settings, self.w, self.courier)  # type: ignore[arg-type]
        self.t = 0

    def step(self, tokens: int = 10, change: float = 0.0) -> None:
        """One training step and its boundary, as the learner does it."""
        self.t += 1
        for w in self.w.values():
            w += change
        self.boundary.count_step(self.t, tokens)
        self.boundary.adopt_ready(self.t)
        self.boundary.make_copies(self.t)

    def adopts(self, fragment: int, version: int, value: float, slot: int = 0, **order: object) -> None:
        self.box.incoming(slot, fragment)[:] = value
        base: dict[str, object] = {"round": 0, "rule": "overwrite", "blend": 0.5, "step": 0}
        self.boundary.carry_out(AdoptOrder(slot, fragment, version, **{**base, **order}))  # type: ignore[arg-type]

    def reads(self, slot: int, round: int, step: int) -> None:
        self.boundary.carry_out(ReadOrder(slot, round, round % 2, step))


@pytest.fixture
def place() -> SteppedBoundary:
    return SteppedBoundary()


def counters(box: Mailbox) -> tuple[list[int], list[int], list[int]]:
    return box.steps.tolist(), box.tokens.tolist(), box.adopted.tolist()


def test_at_first_the_base_is_the_model_and_no_version_is_held(place: SteppedBoundary) -> None:
    assert place.box.base(0).tolist() == [1.0] and place.box.base(1).tolist() == [2.0]
    assert not place.boundary.recovered


def test_tokens_of_a_life_that_is_over_are_dropped(place: SteppedBoundary) -> None:
    """Of several ranks they are known after their step."""
    place.step(tokens=0)
    place.boundary.carry_out(ForgetOrder(1, reset=False))
    place.boundary.add_tokens(30, of_this_life=False)
    place.step(tokens=0)
    place.boundary.add_tokens(20, of_this_life=True)
    assert place.box.tokens.tolist() == [20, 20] and place.box.dropped.tolist() == [30, 30]


def test_steps_and_tokens_count_for_every_fragment(place: SteppedBoundary) -> None:
    place.step(tokens=10)
    place.step(tokens=5)
    assert counters(place.box) == ([2, 2], [15, 15], [-1, -1])


def test_owning_makes_the_base_version_0_and_keeps_the_counters(place: SteppedBoundary) -> None:
    place.step()
    place.boundary.carry_out(fx.Own())
    assert place.boundary.recovered
    assert counters(place.box) == ([1, 1], [10, 10], [0, 0])


class RoundedBoundary:
    """A learner that may be asked for a version 0 that is rounded: one parameter, and a buffer."""

    def __init__(self) -> None:
        self.w = {"buffers/mean/v": torch.tensor([1.0 + 2.0**-12]), "w": torch.tensor([1.0 + 2.0**-12])}
        self.box, settings = boxed(self.w, 1, initial_codec="bf16")
        self.courier = Remembers()
        self.boundary = Boundary(self.box, settings, self.w, self.courier)  # type: ignore[arg-type]

    def values(self) -> list[float]:
        return [float(tensor) for tensor in self.w.values()]


EXACT, ROUNDED = 1.0 + 2.0**-12, 1.0


def test_a_version_0_that_is_rounded_is_taken_into_the_model_once_the_run_has_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = RoundedBoundary()
    assert place.box.base(0).tolist() == [EXACT, ROUNDED], "buffers stay exact"
    assert place.values() == [EXACT, EXACT], "another learner may be asked for version 0"
    assert place.box.count("loss_ppb") == round(1e9 * 2.0**-12 / (2**0.5 * EXACT))
    place.boundary.carry_out(fx.Own())
    assert place.values() == [EXACT, ROUNDED] and place.boundary.recovered
    assert "version 0 is this model rounded to bf16: relative error 1.73e-04" in capsys.readouterr().err
    place.w["w"] += 1.0
    place.boundary.carry_out(fx.Own())
    assert place.values() == [EXACT, 1.0 + ROUNDED], "it is taken once"


def test_steps_and_an_adoption_before_that_leave_the_model_as_it_is() -> None:
    stepped, adopted = RoundedBoundary(), RoundedBoundary()
    stepped.boundary.count_step(1, 10)
    adopted.box.incoming(0, 0)[:] = 3.0
    adopted.boundary.carry_out(AdoptOrder(0, 0, 4, round=0, rule="overwrite", blend=0.5, step=0))
    adopted.boundary.adopt_ready(0)
    for place in (stepped, adopted):
        place.boundary.carry_out(fx.Own())
    assert stepped.values() == [EXACT, EXACT] and adopted.values() == [3.0, 3.0]


def test_a_copy_is_made_at_its_step_and_says_what_it_holds(place: SteppedBoundary) -> None:
    place.boundary.carry_out(fx.Own())
    place.reads(slot=3, round=1, step=2)
    place.step(change=0.5)
    assert place.courier.told() == []
    place.step(change=0.5)
    assert place.courier.told() == [CopyMade(3, 1, 1, t=2, steps=2, tokens=20, base=0, epoch=0)]
    assert place.box.outgoing(3, 1).tolist() == [3.0]


def test_an_order_that_comes_late_is_served_at_the_next_boundary(place: SteppedBoundary) -> None:
    place.step()
    place.reads(slot=0, round=0, step=1)
    place.step()
    [copy] = place.courier.told()
    assert isinstance(copy, CopyMade) and copy.t == 2


def test_adoption_comes_before_the_copy_of_the_same_boundary(place: SteppedBoundary) -> None:
    place.boundary.carry_out(fx.Own())
    place.reads(slot=1, round=0, step=1)
    place.adopts(0, version=4, value=9.0)
    place.step(change=1.0)
    took, copy = place.courier.told()
    assert took == VersionTaken(0, Adopted(0, 4, t=1, dropped=10, missed=10), epoch=0)
    assert copy == CopyMade(1, 0, 0, t=1, steps=0, tokens=0, base=4, epoch=0)
    assert place.box.outgoing(1, 0).tolist() == [9.0]


def test_adoption_resets_the_counters_of_its_fragment_alone(place: SteppedBoundary) -> None:
    place.boundary.carry_out(fx.Own())
    place.step()
    place.adopts(1, version=1, value=7.0)
    place.step()
    assert place.w["w1"].tolist() == [7.0]
    assert counters(place.box) == ([2, 0], [20, 0], [0, 1])


class BaseCopy(Future[None]):
    """The copy of a base for a snapshot: who waits for it is asked what the courier has heard by then."""

    def __init__(self, courier: Remembers) -> None:
        super().__init__()
        self._courier = courier
        self.heard_before: list[type] | None = None

    def result(self, timeout: float | None = None) -> None:
        self.heard_before = [type(frame) for frame in self._courier.sent]


def test_the_courier_hears_of_an_adoption_once_a_snapshot_has_copied_the_base(place: SteppedBoundary) -> None:
    place.boundary.carry_out(fx.Own())
    place.step()
    copies = [BaseCopy(place.courier), BaseCopy(place.courier)]
    place.boundary.hold_bases(copies)
    place.adopts(1, version=1, value=7.0)
    place.step()
    assert copies[1].heard_before is not None and VersionTaken not in copies[1].heard_before
    assert isinstance(place.courier.sent[-1], VersionTaken)
    assert copies[0].heard_before is None, "the other fragment's base does not change"


def test_a_version_for_a_later_step_waits_for_it(place: SteppedBoundary) -> None:
    place.adopts(0, version=1, value=7.0, step=2)
    place.step()
    assert place.w["w0"].tolist() == [1.0]
    place.step()
    assert place.w["w0"].tolist() == [7.0]


def test_blend_follows_the_orders_share(place: SteppedBoundary) -> None:
    place.adopts(0, version=1, value=3.0, rule="blend", blend=0.25)
    place.step()
    assert place.w["w0"].tolist() == [0.25 * 1.0 + 0.75 * 3.0]
    assert counters(place.box)[0] == [0, 1]


def test_carry_subtracts_the_copy_and_keeps_the_steps_since(place: SteppedBoundary) -> None:
    place.boundary.carry_out(fx.Own())
    place.reads(slot=2, round=0, step=1)
    place.step(change=1.0)  # w0 = 2, copied
    place.step(change=1.0)  # w0 = 3
    place.courier.told()
    place.adopts(0, version=1, value=10.0, rule="carry", minus=2, minus_steps=1, minus_tokens=10, held_tokens=10)
    place.step(change=1.0)  # w0 = 4
    assert place.w["w0"].tolist() == [10.0 + (4.0 - 2.0)]
    assert counters(place.box)[0][0] == 2 and counters(place.box)[1][0] == 20
    assert place.courier.told() == [VersionTaken(0, Adopted(0, 1, t=3, steps=2, tokens=20), epoch=0)]


def test_carry_without_a_copy_subtracts_the_base_and_keeps_every_step(place: SteppedBoundary) -> None:
    place.boundary.carry_out(fx.Own())
    place.step(change=1.0)
    place.adopts(0, version=1, value=10.0, rule="carry", minus=BASE)
    place.step(change=1.0)
    assert place.w["w0"].tolist() == [10.0 + (3.0 - 1.0)]
    assert counters(place.box)[0] == [2, 2]


def test_a_hold_waits_from_its_step_until_its_round_is_adopted(place: SteppedBoundary) -> None:
    place.boundary.carry_out(HoldOrder(round=2, fragment=0, step=2))
    place.step()
    assert not place.boundary.is_held(place.t)
    place.step()
    assert place.boundary.is_held(place.t)
    place.adopts(0, version=1, value=1.0, round=0)
    place.boundary.adopt_ready(place.t)
    assert place.boundary.is_held(place.t), "an older round does not end it"
    place.adopts(1, version=1, value=1.0, round=3)
    place.boundary.adopt_ready(place.t)
    assert place.boundary.is_held(place.t), "another fragment does not end it"
    place.adopts(0, version=2, value=1.0, round=2)
    place.boundary.adopt_ready(place.t)
    assert not place.boundary.is_held(place.t)


def test_letting_go_ends_a_hold(place: SteppedBoundary) -> None:
    place.boundary.carry_out(HoldOrder(round=0, fragment=0, step=1))
    place.step()
    place.boundary.carry_out(fx.LetGo(0))
    place.boundary.carry_out(fx.LetGo(5))
    assert not place.boundary.is_held(place.t)


def test_a_cancelled_order_frees_its_slot_and_leaves_the_others(place: SteppedBoundary) -> None:
    place.reads(slot=0, round=0, step=1)
    place.reads(slot=1, round=1, step=1)
    place.boundary.carry_out(fx.CancelRead(1))
    place.boundary.carry_out(fx.CancelRead(7))
    assert place.courier.told() == [SlotFreed(1, incoming=False)]
    place.step()
    [copy] = place.courier.told()
    assert isinstance(copy, CopyMade) and (copy.slot, copy.round) == (0, 0)


def test_one_boundary_makes_several_copies(place: SteppedBoundary) -> None:
    place.reads(slot=0, round=0, step=1)
    place.reads(slot=1, round=1, step=1)
    place.step()
    assert [copy.fragment for copy in place.courier.told() if isinstance(copy, CopyMade)] == [0, 1]


def test_a_second_order_for_the_same_round_frees_the_slot_of_the_first(place: SteppedBoundary) -> None:
    place.reads(slot=0, round=0, step=5)
    place.reads(slot=1, round=0, step=6)
    assert place.courier.told() == [SlotFreed(0, incoming=False)]


def test_forgetting_drops_orders_versions_and_counters(place: SteppedBoundary) -> None:
    place.boundary.carry_out(fx.Own())
    place.step()
    place.reads(slot=1, round=0, step=9)
    place.adopts(1, version=3, value=5.0, slot=2, step=9)
    place.boundary.carry_out(HoldOrder(round=0, fragment=0, step=1))
    place.boundary.carry_out(ForgetOrder(epoch=1, reset=False))
    assert place.courier.told() == [SlotFreed(1, incoming=False), SlotFreed(2, incoming=True)]
    assert counters(place.box) == ([0, 0], [0, 0], [-1, -1]), "they belong to the life before"
    assert not place.boundary.is_held(place.t)
    place.adopts(0, version=0, value=5.0)
    place.step()
    assert place.courier.told() == [VersionTaken(0, Adopted(0, 0, t=2, dropped=10, missed=10), epoch=1)]


def test_broken_numbers_are_gone_the_moment_it_forgets_them(place: SteppedBoundary) -> None:
    place.w["w0"].fill_(float("nan"))
    place.boundary.carry_out(ForgetOrder(epoch=1, reset=True))
    assert [float(w) for w in place.w.values()] == [1.0, 2.0], "the base, at once: one more step would spread them"
    assert not place.boundary.recovered, "but what it holds is no version of the run"


def test_orders_of_a_dead_courier_are_dropped_without_a_word_to_the_next(place: SteppedBoundary) -> None:
    place.boundary.carry_out(ForgetOrder(epoch=3, reset=False))
    place.courier.told()
    place.reads(slot=0, round=0, step=1)
    place.adopts(1, version=1, value=5.0, step=9)
    place.boundary.carry_out(HoldOrder(round=0, fragment=0, step=1))
    place.boundary.drop_orders()
    place.step()
    assert place.courier.told() == []
    assert not place.boundary.is_held(place.t)
    place.reads(slot=0, round=0, step=1)
    place.step()
    [copy] = place.courier.told()
    assert isinstance(copy, CopyMade) and copy.epoch == 0


class Slow:
    """A transfer that is done when the test says so."""

    failed, feedback = False, -1

    def __init__(self) -> None:
        self.over = self.waited = False

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.waited = self.over = True


def test_a_copy_is_told_once_it_is_in_host_memory_and_in_order(
    place: SteppedBoundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers = [Slow(), Slow()]
    monkeypatch.setattr(place.boundary._offload, "read", lambda fragment, slot, *_: transfers[slot])
    place.reads(slot=0, round=0, step=1)
    place.reads(slot=1, round=1, step=1)
    place.step()
    transfers[1].over = True
    place.boundary.send_finished_copies()
    assert place.courier.told() == []
    transfers[0].over = True
    place.boundary.send_finished_copies()
    assert [frame.round for frame in place.courier.told() if isinstance(frame, CopyMade)] == [0, 1]


def test_a_dead_couriers_copies_under_way_are_waited_for_and_not_told(
    place: SteppedBoundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = Slow()
    monkeypatch.setattr(place.boundary._offload, "read", lambda *_: transfer)
    place.reads(slot=0, round=0, step=1)
    place.step()
    place.boundary.drop_orders()
    assert transfer.waited
    assert place.courier.told() == []


def test_a_version_that_is_not_there_yet_is_taken_later_unless_a_hold_waits_for_it(
    place: SteppedBoundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = Slow()
    monkeypatch.setattr(place.boundary._offload, "bring", lambda *_, **__: transfer)
    place.adopts(0, version=1, value=7.0)
    place.step()
    assert place.w["w0"].tolist() == [1.0] and not transfer.waited
    place.boundary.carry_out(HoldOrder(round=0, fragment=0, step=1))
    place.boundary.adopt_ready(place.t)
    assert place.w["w0"].tolist() == [7.0] and transfer.waited


def test_while_idle_everything_is_served_at_once(place: SteppedBoundary) -> None:
    place.boundary.carry_out(fx.Own())
    place.step()
    place.adopts(1, version=1, value=5.0, step=50)
    place.reads(slot=1, round=0, step=50)
    place.boundary.serve_orders(over=True)
    assert [type(frame) for frame in place.courier.told()] == [VersionTaken, CopyMade]
    assert place.w["w1"].tolist() == [5.0]


def test_while_idle_the_same_values_are_not_copied_again_and_again(place: SteppedBoundary) -> None:
    place.boundary.carry_out(fx.Own())
    place.step()
    place.reads(slot=0, round=0, step=2)
    place.boundary.serve_orders(over=True)
    place.courier.told()
    place.reads(slot=1, round=0, step=2)
    place.boundary.serve_orders(over=True)
    assert place.courier.told() == []
    place.adopts(0, version=1, value=5.0)
    place.boundary.serve_orders(over=True)
    assert [type(frame) for frame in place.courier.told()] == [VersionTaken, CopyMade]


def test_before_the_first_step_a_copy_waits_for_its_step(place: SteppedBoundary) -> None:
    """Synchronous orders come before the run's parameters are all adopted; a copy at step 0 would hold nothing."""
    place.boundary.carry_out(fx.Own())
    place.reads(slot=0, round=0, step=1)
    place.boundary.serve_orders()
    assert place.courier.told() == []
    place.step()
    assert [type(frame) for frame in place.courier.told()] == [CopyMade]


def test_a_finished_run_leaves_its_own_values_in_the_model(place: SteppedBoundary) -> None:
    place.boundary.carry_out(fx.Own())
    place.box.base_version[:] = [3, -1]
    place.box.base(0)[:] = 8.0
    place.box.base(1)[:] = 8.0
    place.step(change=1.0)
    place.boundary.load_base()
    assert place.w["w0"].tolist() == [8.0]
    assert place.w["w1"].tolist() == [3.0], "a base that is being written is nobody's value"


def test_what_an_adoption_drops_is_told_by_cause(place: SteppedBoundary) -> None:
    place.boundary.carry_out(fx.Own())
    for _ in range(3):
        place.step()
    place.adopts(0, version=1, value=9.0, held_tokens=20)
    place.adopts(1, version=1, value=9.0)
    place.step()
    assert place.box.dropped.tolist() == [20, 40]
    assert place.box.missed.tolist() == [0, 40], "version 1 of fragment 0 holds its first two steps"


def test_a_buffer_is_taken_as_it_is_whatever_the_rule() -> None:
    """Carried on, this variance would be 20 + (60 - 100)."""
    tensors = {"buffers/mean/norm.running_var": torch.tensor([100.0]), "w": torch.tensor([1.0])}
    box, settings = boxed(tensors, 1)
    boundary = Boundary(box, settings, tensors, Remembers())  # type: ignore[arg-type]
    boundary.carry_out(fx.Own())
    for tensor, value in zip(tensors.values(), (60.0, 3.0), strict=True):
        tensor.fill_(value)
    box.incoming(0, 0)[:] = [20.0, 5.0]
    boundary.carry_out(AdoptOrder(0, 0, 1, round=0, rule="carry", blend=0.5, step=0, minus=BASE))
    boundary.adopt_ready(1)
    assert [tensor.item() for tensor in tensors.values()] == [20.0, 5.0 + (3.0 - 1.0)]


def test_a_split_parameter_is_adopted_piece_by_piece() -> None:
    own = torch.nn.Parameter(torch.arange(8.0).view(4, 2))
    box, settings = boxed({"w": own}, 2)
    boundary = Boundary(box, settings, {"w": own}, Remembers())  # type: ignore[arg-type]
    assert box.base(0).tolist() == [0, 1, 2, 3] and box.base(1).tolist() == [4, 5, 6, 7]
    box.incoming(0, 1)[:] = [40, 50, 60, 70]
    boundary.carry_out(AdoptOrder(0, 1, 1, 0, "overwrite", 0.5, 0))
    boundary.count_step(1, 10)
    boundary.adopt_ready(1)
    assert own.tolist() == [[0, 1], [2, 3], [40, 50], [60, 70]] and own.requires_grad
    assert counters(box) == ([1, 0], [10, 0], [-1, 1])
