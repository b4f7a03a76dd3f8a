"""A learner whose frozen parameters are not the run's seeks a peer's, from the run's very beginning on."""

from __future__ import annotations

import msgspec
import pytest

from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.messages import Fresh, Helped, Seek, TensorSpec, Welcome
from atoll.protocol.records import BegunRecord
from atoll.protocol.settings import Settings

TENSORS = (TensorSpec("w", (2,), "float32"), TensorSpec("v", (2,), "float32"))
SETTINGS = Settings(fragments=2, sync_every=4).resolved(2)
WELCOME = Welcome(
    run="r", incarnation=1, settings=SETTINGS, fingerprint="f", versions=(0, 0), gathering=0, frozen="run's"
)


def sought(machine: LearnerMachine, welcome: Welcome) -> list[Seek]:
    effects = machine.handle(0.0, fx.Arrived(welcome))
    return [effect.message for effect in effects if isinstance(effect, fx.Say) and isinstance(effect.message, Seek)]


def learner(frozen: str, *, takes: bool = True, restored: bool = False) -> LearnerMachine:
    return LearnerMachine("a", "session", TENSORS, restored=restored, frozen=frozen, takes_frozen=takes)


@pytest.mark.parametrize("restored", [False, True])
def test_other_ones_are_sought_even_in_a_run_that_has_only_begun(restored: bool) -> None:
    machine = learner("other", restored=restored)
    assert machine.hello().frozen == "other"
    assert [(seek.after, seek.frozen) for seek in sought(machine, WELCOME)] == [(0, True)]
    assert not machine.recovered


@pytest.mark.parametrize(("own", "run", "takes"), [("run's", "run's", True), ("", "run's", False), ("other", "", True)])
def test_the_same_ones_and_what_is_not_compared_are_not_sought(own: str, run: str, takes: bool) -> None:
    assert not sought(learner(own, takes=takes), msgspec.structs.replace(WELCOME, frozen=run))


def test_once_taken_they_are_not_sought_again() -> None:
    machine = learner("other")
    sought(machine, WELCOME)
    machine.handle(1.0, fx.Arrived(Helped(ticket="t", peer="b", size=1, digest="d")))
    machine.handle(1.0, fx.StateCame("t"))
    machine.handle(1.0, fx.Taken("t"))
    machine.handle(2.0, fx.Disconnected("the line broke"))
    assert machine.hello().frozen == "run's" and not sought(machine, WELCOME)


def test_without_them_they_are_sought_again_after_a_reconnect() -> None:
    machine = learner("other")
    sought(machine, WELCOME)
    machine.handle(1.0, fx.Arrived(Fresh(reason="nobody helps")))
    machine.handle(2.0, fx.Disconnected("the line broke"))
    assert [seek.frozen for seek in sought(machine, WELCOME)] == [True]


def test_a_newcomer_names_what_it_does_not_merge_and_only_then() -> None:
    machine = LearnerMachine("a", "session", TENSORS, unmerged=("frozen.weight",), renamed=("qkv.weight",))
    assert (machine.hello().unmerged, machine.hello().renamed) == (("frozen.weight",), ("qkv.weight",))
    machine.handle(0.0, fx.Arrived(WELCOME))
    assert machine.hello().run == "r" and machine.hello().unmerged == machine.hello().renamed == ()


def test_a_run_that_began_before_names_were_told_is_read_as_it_was() -> None:
    begun = BegunRecord("r", SETTINGS, {}, TENSORS, "f", frozen="digest", unmerged=("w",), renamed=("v",))
    *before, unmerged, renamed = msgspec.msgpack.decode(msgspec.msgpack.encode(begun))
    assert (unmerged, renamed) == (["w"], ["v"])
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(before), type=BegunRecord)
    assert read == msgspec.structs.replace(begun, unmerged=(), renamed=())
