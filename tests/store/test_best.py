"""model-best.safetensors is what the run had committed, or the finding says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.store.written import WrittenRun, well, with_rounds, wrong

from atoll.config import Config
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import TensorSpec
from atoll.store.export import export_kept, export_run
from atoll.store.rundir import facts_of_model, read_model_facts, save_model


def keep_best(run: WrittenRun, /, **changes: str) -> None:
    """As an evaluator would that fetched everything now."""
    tensors = {name: np.array(tensor) for name, tensor in run.parameters.tensors_by_name().items()}
    facts = facts_of_model("small", run.history.committed, run.history.versions)
    save_model(run.dir.best_model, tensors, {**facts, "figure": "loss", "score": "0.5", **changes})


def test_it_is_well_long_after_its_outer_gradients_were_trimmed(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 4)
    keep_best(run)
    for _ in range(3):
        for _ in range(4):
            run.round()
        run.cut()
    for payload in run.dir.journal.glob("payload-*.bin"):
        payload.unlink()
    assert not well(run).remarks


def test_other_values_than_the_run_committed_are_named(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 4)
    keep_best(run)
    before = read_model_facts(run.dir.best_model)
    run.round()
    tensors = {name: np.array(tensor) for name, tensor in run.parameters.tensors_by_name().items()}
    save_model(run.dir.best_model, tensors, before)  # the values of now, the versions of then
    assert "model-best.safetensors is not what the run had committed: fragment 1 has other values" in wrong(run)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"run": "another"}, "model-best.safetensors is of run another, not of small"),
        ({"versions": "1,2"}, "model-best.safetensors does not say which versions it holds"),
    ],
)
def test_a_file_of_elsewhere_is_named(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    run = with_rounds(tmp_path / "run", 4)
    keep_best(run, **changes)
    assert said in wrong(run)


def test_of_version_0_the_journal_has_no_digest(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 2)
    keep_best(run)  # fragment 2 is as it was at the start
    assert (
        "1 fragments of model-best.safetensors are of versions that the journal has no digest of"
        in well(run).remarks[0]
    )


def test_it_is_exported_as_it_was_kept(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 4)
    run.cut()
    run.dir.settings.write_bytes(Config(by_hand=True).toml())
    with pytest.raises(ConfigError, match=r"holds no model-best\.safetensors: a script with a scorer") as no:
        export_kept(run.dir.path, tmp_path / "best.safetensors", "best")
    assert "in atoll-learners/small/evaluator or its --folder: copy it into the run's folder" in str(no.value)
    keep_best(run)
    best = export_kept(run.dir.path, tmp_path / "best.safetensors", "best")
    file, facts = best.file, best.facts
    assert file.read_bytes() == run.dir.best_model.read_bytes() and facts["score"] == "0.5"
    with pytest.raises(ConfigError, match="is there already"):
        export_kept(run.dir.path, tmp_path / "best.safetensors", "best")


SPLIT = (TensorSpec("embed", (60, 4), "float32", embedding=True), TensorSpec("gain", (), "float32"))


def test_split_tensors_are_checked_and_exported_whole(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 4, tensors=SPLIT)
    assert sum(len(part.pieces) for part in run.parameters.plan.fragments) == 4, "three of embed"
    run.cut()
    keep_best(run)
    assert not well(run).remarks
    exported = load_file(export_run(run.dir.path, tmp_path / "model.safetensors").file)
    due = run.parameters.tensors_by_name()
    assert exported.keys() == due.keys() and all(np.array_equal(exported[name], due[name]) for name in due)
    tensors = {name: np.array(tensor) for name, tensor in due.items()}
    tensors["embed"][59, 3] += 1  # the last row
    save_model(run.dir.best_model, tensors, read_model_facts(run.dir.best_model))
    [last] = [p.index for p in run.parameters.plan.fragments if any(x.label == "embed[42:60]" for x in p.pieces)]
    assert f"fragment {last} has other values" in wrong(run)
