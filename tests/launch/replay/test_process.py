"""What a replay tells a training process is what its tape says, to the bit."""

from __future__ import annotations

import math
import struct
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.launch.replay.process import ReplayedProcess, ReplayServices
from atoll.launch.replay.recording import ProcessRecording
from atoll.mailbox.channel import CourierChannel, RunProgress, decode_to_training
from atoll.protocol.records import PlayedRecord, Stretch, decode, encode
from atoll.protocol.settings import Settings
from atoll.protocol.tape import InformedEntry


class Journal:
    """In place of what all actors share: the settings, and what the journal's rounds say."""

    settings = Settings(fragments=2, sync_every=4).resolved(2)

    def __init__(self, progress: dict[int, float]) -> None:
        self._progress = progress

    def progress(self, committed: int) -> float:
        return self._progress[committed]

    def global_step(self, committed: int) -> int:
        return 2 * committed


def told(entry: InformedEntry, progress: dict[int, float]) -> RunProgress:
    near, theirs = CourierChannel.pair()
    actor = ReplayedProcess(ProcessRecording("a", "session", 1), [entry], cast(Any, None))
    actor._channel, actor._shared, actor._box = near, cast(ReplayServices, Journal(progress)), cast(Any, object())
    assert actor._perform_action(entry) is None
    far = CourierChannel(theirs)
    [frame] = map(decode_to_training, far.receive())
    far.close()
    near.close()
    assert isinstance(frame, RunProgress)
    return frame


@given(progress=st.floats(0.0, 1.0) | st.just(math.nextafter(1.0, 2.0)), step=st.integers(0, 2**40))
def test_it_is_told_the_very_values_that_were_taped(progress: float, step: int) -> None:
    """Through the journal, and whatever the journal's rounds say: a run from a cut has none for its beginning."""
    record = decode(encode(PlayedRecord((Stretch("a", 1, 0, (InformedEntry(3, 41, progress, step),)),))))
    assert isinstance(record, PlayedRecord)
    [entry] = record.tapes[0].entries
    assert isinstance(entry, InformedEntry)
    found = told(entry, {41: 0.123})
    assert (found.committed, found.global_step) == (41, step)
    assert struct.pack(">d", found.progress) == struct.pack(">d", progress)


@pytest.mark.parametrize("committed", [0, 6])
def test_a_tape_without_values_goes_by_the_rounds_of_the_journal(committed: int) -> None:
    assert told(InformedEntry(3, committed), {0: 0.0, 6: 0.25}) == RunProgress(committed, committed / 24, 2 * committed)
