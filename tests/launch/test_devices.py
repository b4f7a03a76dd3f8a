from __future__ import annotations

from pathlib import Path

import pytest

from atoll.launch import environment
from atoll.launch.environment import assign_devices, find_devices, parse_nvidia_smi, parse_visible
from atoll.protocol.errors import ConfigError

FOUR = ("0", "1", "2", "3")


def test_as_many_learners_as_devices_get_one_each_and_the_evaluator_sits_beside() -> None:
    found = assign_devices(FOUR, 4)
    assert found is not None
    assert found.learners == (("0",), ("1",), ("2",), ("3",)) and found.evaluator == ("0",)
    line = "GPUs: learner-0 on 0, learner-1 on 1, learner-2 on 2, learner-3 on 3"
    assert found.describe(evaluator=True) == f"{line}, evaluator on 0"
    assert found.describe(evaluator=False) == line


def test_what_is_left_over_is_the_evaluators() -> None:
    found = assign_devices(FOUR, 3)
    assert found is not None and found.learners == (("0",), ("1",), ("2",)) and found.evaluator == ("3",)


def test_more_devices_than_learners_are_dealt_in_equal_blocks() -> None:
    found = assign_devices(FOUR, 2)
    assert found is not None and found.learners == (("0", "1"), ("2", "3")) and found.evaluator == ("0",)
    alone = assign_devices(FOUR, 1)
    assert alone is not None and alone.learners == (FOUR,), "a script of several GPUs sees them all"


def test_more_learners_than_devices_share_in_turn() -> None:
    found = assign_devices(("0", "1"), 3)
    assert found is not None and found.learners == (("0",), ("1",), ("0",))
    assert found.evaluator == ("1",), "where the fewest learners are"
    assert found.devices_of(4) == ("1",), "one that joins later"


def test_a_strict_run_refuses_learners_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"4 learners do not fit on 2 GPUs: start at most 2 with --learners, or"):
        assign_devices(("0", "1"), 4, strict=True)
    with pytest.raises(ConfigError, match=r"2 learners do not fit on 1 GPU: "):
        assign_devices(("0",), 2, strict=True)
    with pytest.raises(ConfigError, match=r"this machine shows no NVIDIA GPU: leave it out"):
        assign_devices((), 1, strict=True)
    assert assign_devices(FOUR, 4, strict=True) is not None


def test_the_ranks_of_a_learner_see_all_of_its_gpus() -> None:
    found = assign_devices(FOUR, 2, 2)
    assert found is not None and found.learners == (("0", "1"), ("2", "3"))
    shared = assign_devices(("0", "1", "2"), 2, 2)
    assert shared is not None and shared.learners == (("0", "1"), ("2", "0")), "learners share, ranks of one do not"
    few = assign_devices(("0",), 2, 2)
    assert few is not None and few.learners == (("0",), ("0",)), "each device once, or CUDA shows none"


def test_a_strict_run_refuses_ranks_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="3 learners of 2 ranks do not fit on 4 GPUs: start at most 2 with --learner"):
        assign_devices(FOUR, 3, 2, strict=True)
    with pytest.raises(ConfigError, match="1 learners of 8 ranks do not fit on 4 GPUs: start learners of at most 4 wi"):
        assign_devices(FOUR, 1, 8, strict=True)
    assert assign_devices(FOUR, 2, 2, strict=True) is not None


def test_without_a_gpu_nothing_is_dealt_out() -> None:
    assert assign_devices((), 4) is None


def test_what_the_operator_made_visible_is_all_there_is() -> None:
    assert find_devices({"CUDA_VISIBLE_DEVICES": "2,3"}, lambda: FOUR) == ("2", "3")
    assert find_devices({"CUDA_VISIBLE_DEVICES": ""}, lambda: FOUR) == ()
    assert find_devices({}, lambda: FOUR) == FOUR
    assert parse_visible("GPU-8a, MIG-1b-2c ,0") == ("GPU-8a", "MIG-1b-2c", "0")
    assert parse_visible("1,-1,0") == ("1",), "CUDA ends at the first that is none"


def test_the_driver_names_gpus_by_number_and_parts_of_them_by_identifier() -> None:
    whole = "GPU 0: NVIDIA H200 (UUID: GPU-5d5ba0d6)\nGPU 1: NVIDIA H200 (UUID: GPU-6a1)\n"
    assert parse_nvidia_smi(whole) == ("0", "1")
    parted = whole + "  MIG 1g.18gb     Device  0: (UUID: MIG-c6d4f1ef-42e4)\n  MIG 1g.18gb Device 1: (UUID: MIG-cba)\n"
    assert parse_nvidia_smi(parted) == ("MIG-c6d4f1ef-42e4", "MIG-cba")
    assert parse_nvidia_smi("No devices were found\n") == ()


def test_nvidia_smi_is_asked_and_without_it_the_drivers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "DRIVER", tmp_path / "gpus")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_devices({}) == (), "a machine without an NVIDIA driver"
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / bus).mkdir(parents=True)
    assert find_devices({}) == ("0", "1")
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-5d5ba0d6)'\n")
    smi.chmod(0o755)
    assert find_devices({}) == ("0",)
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert find_devices({}) == ("0", "1"), "it failed"
