"""What ranks give in a replay counts when all have given it, and is put together as the syncer does."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from atoll.launch.replay.process import GivenContribution, ReplayServices
from atoll.launch.replay.ranks import ReplayedRanks
from atoll.launch.replay.recording import ProcessRecording, RecordedCopy
from atoll.mailbox.channel import CourierChannel, Start
from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import make_codec
from atoll.numerics.fragments import make_plan
from atoll.protocol.messages import Box, TensorSpec
from atoll.protocol.settings import Settings

TENSORS = (TensorSpec("a", (5, 4), "float32"), TensorSpec("b", (4,), "float32"))
SETTINGS = Settings(fragments=1, sync_every=4).resolved(2)
PLAN = make_plan(TENSORS, 1)
UNEVEN = (
    (Box("a", (0, 0), (3, 4)), Box("b", (0,), (4,))),
    (Box("a", (3, 0), (2, 4)), Box("b", (0,), (4,), sends=False)),
)
"""Rank 0 sends three rows of a, and b, which both hold."""
WHOLE = np.arange(24, dtype=np.float32)


@dataclass
class Conductor:
    """Takes down what it is told."""

    given: list[FloatArray] = field(default_factory=list)
    owned: list[FloatArray] = field(default_factory=list)
    adopted: list[tuple[int, int]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def serve(self) -> ReplayServices:
        return ReplayServices(
            plan=PLAN,
            fingerprint=PLAN.fingerprint,
            sent=PLAN.fragments.__getitem__,
            settings=SETTINGS,
            codec=make_codec("fp32"),
            version=lambda fragment, version: WHOLE if version == 1 else None,
            adopted=lambda fragment, version: self.adopted.append((fragment, version)),
            moments=lambda fragment, version: None,
            given=lambda copy, learner, given: self.given.append(given.delta),
            owned=self.owned.extend,
            state=lambda ticket: None,
            lent=lambda part, t, state: None,
            leases=cast(Any, None),
            progress=cast(Any, None),
            global_step=cast(Any, None),
            remark=self.remarks.append,
        )


def connect(conductor: Conductor) -> tuple[ReplayedRanks, list[ReplayServices]]:
    ranks = ReplayedRanks(ProcessRecording("a", "session", 1), [], cast(Any, None), 2)
    served = []
    for rank in (1, 0):
        assert not ranks.connected
        channel, theirs = CourierChannel.pair()
        far = CourierChannel(theirs)
        start = Start("a", "session", "replay", TENSORS, boxed=True, ranks=UNEVEN, rank=rank)
        with open(os.devnull) as meeting_place:
            far.send(start, meeting_place.fileno() if rank == 0 else None)
        assert channel.receive()
        process = ranks.connect(channel, start, conductor.serve())
        served.insert(0, process._replay)
        channel.close()
        far.close()
    assert ranks.connected
    return ranks, served


def test_a_contribution_counts_when_every_rank_has_given_its_part() -> None:
    conductor = Conductor()
    _, served = connect(conductor)
    copy = RecordedCopy(4, 7, 0, 0, 4)
    for rank, values in ((1, WHOLE[12:20]), (0, np.concatenate([WHOLE[:12], WHOLE[20:]]))):
        assert not conductor.given
        served[rank].given(copy, "a", GivenContribution(values, None))
    assert [one.tolist() for one in conductor.given] == [WHOLE.tolist()]


def test_a_rank_is_given_what_it_holds_of_a_version() -> None:
    _, served = connect(Conductor())
    first, second = (rank.version(0, 1) for rank in served)
    assert first is not None and first.tolist() == [*range(12), *range(20, 24)]
    assert second is not None and second.tolist() == [*range(12, 20), *range(20, 24)]
    assert served[0].version(0, 2) is None


def test_the_first_parameters_are_put_together_of_what_ranks_send() -> None:
    conductor = Conductor()
    _, served = connect(conductor)
    served[1].owned([np.concatenate([WHOLE[12:20], np.full(4, 99, np.float32)])])
    assert not conductor.owned
    served[0].owned([np.concatenate([WHOLE[:12], WHOLE[20:]])])
    assert [one.tolist() for one in conductor.owned] == [WHOLE.tolist()]


def test_a_version_is_adopted_when_every_rank_has_it_and_rank_0_alone_remarks() -> None:
    conductor = Conductor()
    _, served = connect(conductor)
    for rank in served:
        assert not conductor.adopted
        rank.adopted(0, 1)
        rank.remark("another machine")
    assert conductor.adopted == [(0, 1)] and conductor.remarks == ["another machine"]
