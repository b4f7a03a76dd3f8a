"""Every input either decodes to a message or raises PeerError of one line of at most 300 characters, no single input
takes three times as long as an honest hello of 40,000 tensors, and the memory of the process does not grow by more than
64 MiB."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from tests.fabric.fuzz import Verdict, again_s, allowed_s, campaign, large_ones, outcome

GROWN_MIB = 64.0


def campaigns(inputs: int, seed: int, processes: int) -> list[Verdict]:
    """Over fresh processes, so that memory is theirs alone."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        shares = [pool.submit(campaign, seed + number, inputs // processes) for number in range(processes)]
        return [share.result() for share in shares]


def check(verdicts: list[Verdict]) -> None:
    for verdict in verdicts:
        print(verdict._replace(wrong=verdict.wrong[:5]))
        assert verdict.wrong == []
        assert verdict.grown_mib <= GROWN_MIB
        assert verdict.messages > verdict.inputs // 10 and verdict.hellos > verdict.inputs // 200, (
            "too tame, or too wild"
        )


def test_every_input_is_a_message_or_an_error_of_one_line() -> None:
    check(campaigns(16_000, seed=1, processes=1))


@pytest.mark.faults
def test_a_million_inputs_are_messages_or_errors_of_one_line() -> None:
    check(campaigns(1_000_000, seed=1000, processes=2))


def test_what_is_as_large_as_a_frame_may_be_is_read_in_time() -> None:
    for given in large_ones():
        assert not outcome(given)[1].startswith("!"), given.how
        assert min(again_s(given) for _ in range(3)) <= allowed_s(), given.how
