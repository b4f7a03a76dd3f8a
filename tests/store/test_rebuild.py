"""Θ and the outer state are made again from cuts and payloads; whatever does not come out the same is named."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from tests.store.written import (
    OUTER,
    P,
    begun,
    cut_run,
    flip,
    well,
    whole,
    with_rounds,
    wrong,
)

from atoll.choices import OUTER_OPTIMIZER
from atoll.config import Outer
from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import make_plan
from atoll.protocol.messages import TensorSpec
from atoll.protocol.records import ChangedRecord, ResetRecord
from atoll.store import rebuild
from atoll.store.cuts import folder_of
from atoll.syncer.parameters import Parameters

# ---- parameters -----------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_a_payload_is_named(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    for file in (1, 2, 3):  # behind cut 0, behind cut 2, behind cut 4
        path = run.dir.journal / f"payload-000001-{file:04d}.bin"
        flip(path, 5)
        assert wrong(run).startswith(f"{path} is damaged at byte 0, a payload of")
        flip(path, 5)
    well(run)


def test_a_payload_that_is_missing_is_named_unless_a_newer_cut_makes_up_for_it(tmp_path: Path) -> None:
    run = cut_run(tmp_path / "run")
    (run.dir.journal / "payload-000001-0002.bin").unlink()
    assert well(run).facts["rebuilt_rounds"] == 3
    path = run.dir.journal / "payload-000001-0003.bin"
    path.unlink()
    expected = f"{path} is missing: it holds the outer gradient of round 4, and no newer cut makes up for it"
    assert wrong(run) == expected


def test_what_a_run_was_rolled_back_to_may_be_missing_before_a_newer_cut_alone(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 3)
    run.set_guard("rollback")
    for file in (2, 3):
        run.cut()
        run.roll_back(run.history.committed - 1)
        run.round()
        run.round()
        path = run.dir.journal / f"payload-000001-{file:04d}.bin"
        assert path.exists() and well(run)
    (run.dir.journal / "payload-000001-0002.bin").unlink()
    assert well(run).facts["rebuilt_rounds"] == 5
    path.unlink()
    behind = f"what the run was rolled back to behind round {run.history.committed - 3}"
    assert wrong(run) == f"{path} is missing: it holds {behind}, and no newer cut makes up for it"


def test_a_round_that_gives_another_digest_is_named(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 2)
    run.round(lambda record: replace(record, digest="0" * 32))
    assert wrong(run).startswith("round 2 gives fragment 2 the digest ")


def test_a_payload_of_another_size_is_named(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 2)
    honest = run.raw
    run.raw = lambda record, gradient=None: honest(record, gradient and gradient[:-1])  # type: ignore[method-assign]
    run.round()
    assert "are no outer gradient of fragment 2: it has" in wrong(run) and wrong(run).startswith("round 2, at byte ")


def test_a_cut_that_the_rounds_before_it_do_not_give_is_named(tmp_path: Path) -> None:
    """Everything fits its digests, and the rounds behind it follow from it: only the way there can tell."""
    run = cut_run(tmp_path / "run")
    run.parameters._state[1].own_arrays()["momentum"][2] += 1.0
    run.cut()
    run.round()
    path = folder_of(run.dir.cuts, 5) / "momentum-001.bin"
    assert wrong(run) == f"{path} is not what cut 4 and the rounds behind it give"


def without(arrays: dict[str, FloatArray], name: str) -> dict[str, FloatArray]:
    return {key: values for key, values in arrays.items() if key != name}


@pytest.mark.parametrize("name", ["theta-001", "momentum-002"])
def test_a_cut_that_lacks_an_array_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    run = cut_run(tmp_path / "run")
    whole = run.parameters.hold_arrays
    monkeypatch.setattr(run.parameters, "hold_arrays", lambda: without(whole(), name))
    run.cut()
    assert wrong(run) == f"{folder_of(run.dir.cuts, 5) / name}.bin is not what cut 4 and the rounds behind it give"


def test_a_first_cut_of_another_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Parameters.hold_arrays
    monkeypatch.setattr(Parameters, "hold_arrays", lambda self: without(whole(self), "theta-001"))
    assert wrong(begun(tmp_path / "less")) == "cut 0 cannot be used: some fragment's values are missing"
    monkeypatch.setattr(Parameters, "hold_arrays", lambda self: {**whole(self), "theta-001": np.zeros(5, np.float32)})
    problem = wrong(begun(tmp_path / "other"))
    assert problem == "cut 0 cannot be used: theta-001 has 5 values, another number than its fragment"


def test_a_model_that_this_version_cuts_another_way_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_rounds(tmp_path / "run", 1)
    monkeypatch.setattr(rebuild, "make_plan", lambda *given: replace(make_plan(*given), fingerprint="another"))
    assert "this version of Atoll makes other fragments of the run's model" in wrong(run)


def test_changed_outer_settings_are_followed(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 4)
    slower: dict[str, str | float] = {**OUTER, "lr": 0.3, "momentum": 0.8}
    run.parameters.change_outer(Outer(lr=0.3, momentum=0.8))
    run.write(ChangedRecord(run.history.settings, slower, "outer.lr"))
    for _ in range(3):
        run.round()
    run.cut()
    run.round()
    assert well(run).facts["rebuilt_rounds"] == 8
    run.parameters.change_outer(Outer(lr=0.1))
    run.round()
    assert wrong(run).startswith("round 8 gives fragment 2 the digest ")


def test_momentum_begins_at_zero_where_it_was_off(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 4)
    for momentum in (0.0, 0.6):
        changed: dict[str, str | float] = {**OUTER, "momentum": momentum}
        run.parameters.change_outer(Outer(**changed))  # type: ignore[arg-type]
        run.write(ChangedRecord(run.history.settings, changed, "another phase"))
        held = [run.parameters.momentum(fragment) for fragment in range(len(run.parameters.plan.fragments))]
        empty = [one is None or not one.any() for one in held]
        assert all(empty) if momentum else not any(empty), "without momentum the array holds the last gradient"
        for _ in range(4):
            run.round()
    assert well(run).facts["rebuilt_rounds"] == 12


def test_a_reset_of_the_outer_state_is_followed(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 4)
    run.parameters.reset_outer_state(1)
    run.write(ResetRecord(1, "the outer step gave values that are not finite"))
    run.round()
    assert well(run).facts["rebuilt_rounds"] == 5
    run.parameters.reset_outer_state(2)
    run.round()
    assert wrong(run).startswith("round 5 gives fragment 2 the digest ")


def test_large_fragments_and_other_optimizers_come_out_bit_for_bit(tmp_path: Path) -> None:
    """The syncer steps beside the committed version and in pieces, this reader in place and at once."""
    tensors = (
        TensorSpec("a", (300, 301), "float32"),
        TensorSpec("b", (70_001,), "float32"),
        TensorSpec("c", (9,), "float32"),
    )
    for name in OUTER_OPTIMIZER.names():
        run = with_rounds(tmp_path / name, 4, tensors=tensors, outer={**OUTER, "optimizer": name})
        run.cut()
        for _ in range(P):
            run.round()
        assert well(run).facts["rebuilt_rounds"] == 7


# ---- the model ------------------------------------------------------------------------------------------------------


def test_a_changed_model_is_named_with_its_tensor(tmp_path: Path) -> None:
    run = whole(tmp_path / "run")
    flip(run.dir.model, run.dir.model.stat().st_size - 1)
    problem = wrong(run)
    assert problem.startswith(f"{run.dir.model} is not the head of the run: ")
    assert "; tensor " in problem and problem.endswith("the cuts and the journal give")


def test_a_torn_model_is_named(tmp_path: Path) -> None:
    run = whole(tmp_path / "run")
    os.truncate(run.dir.model, run.dir.model.stat().st_size - 4)
    assert wrong(run).startswith(f"{run.dir.model} is not the head of the run: ") and "; it cannot be read: " in wrong(
        run
    )


def test_a_finished_run_without_its_model_is_remarked_on(tmp_path: Path) -> None:
    run = whole(tmp_path / "run")
    run.dir.model.unlink()
    (remark,) = well(run).remarks
    assert remark.startswith("the run is finished, but model.safetensors is not there")


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    run = whole(tmp_path / "run")
    run.dir.model.unlink()
    run.dir.model.mkdir()
    assert wrong(run).startswith(f"{run.dir.model} is not the head of the run: ") and "; it cannot be read: " in wrong(
        run
    )
