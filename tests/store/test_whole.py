"""The whole model comes out: merged tensors from the run, all others as its first learner has them, of any type."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.store.written import WrittenRun, with_rounds
from torch import nn

from atoll.learner.saved_state import Saver
from atoll.learner.snapshot import Snapshot, write
from atoll.learner.unmerged import UnmergedTensors
from atoll.protocol.errors import ConfigError
from atoll.store.cuts import read_manifest
from atoll.store.export import NOTHING_UNMERGED, export_kept, export_run
from atoll.store.rundir import UNMERGED

UNMERGED_THERE = {
    "frozen.weight": torch.randn(3, 5).bfloat16(),
    "mask": torch.tensor([True, False, True]),
    "steps": torch.tensor(3),
    "embed": torch.zeros(1),  # merged: the run's counts
}


def keep(run: WrittenRun, tensors: dict[str, torch.Tensor], learner: str = "learner-0") -> Path:
    path = run.dir.learner(learner) / UNMERGED
    write(path, Snapshot(tensors, {}))
    return path


def test_frozen_parameters_and_buffers_come_with_the_merged_ones(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 4)
    keep(run, UNMERGED_THERE)
    exported = export_run(run.dir.path, tmp_path / "whole.safetensors")
    found, merged = load_file(exported.file), run.parameters.tensors_by_name()
    assert found.keys() == merged.keys() | UNMERGED_THERE.keys()
    assert all(torch.equal(found[name], torch.from_numpy(values)) for name, values in merged.items())
    for name in ("frozen.weight", "mask", "steps"):
        assert found[name].dtype == UNMERGED_THERE[name].dtype and torch.equal(found[name], UNMERGED_THERE[name])
    assert exported.remarks == (
        "frozen parameters and local buffers are those that learner-0 began with: cut 0 has no others",
    )


def test_buffers_are_those_of_the_cut(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 3)
    run.cut()
    keep(run, UNMERGED_THERE)
    part = read_manifest(run.dir.cuts, 3).learners["learner-0"]
    write(run.dir.learner("learner-0") / part.file, Snapshot({"buffers/steps": torch.tensor(77)}, {}))
    exported = export_run(run.dir.path, tmp_path / "whole.safetensors")
    assert load_file(exported.file)["steps"] == 77
    assert exported.remarks == ("frozen parameters and local buffers are those of learner-0",)


def test_a_model_of_merged_tensors_alone_is_whole_without_more(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 2)
    keep(run, {})
    plain, whole = (tmp_path / f"{name}.safetensors" for name in ("plain", "whole"))
    export_run(run.dir.path, plain)
    assert export_run(run.dir.path, whole).remarks == ()
    one, other = load_file(plain), load_file(whole)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("digest", "remarks"), [(NOTHING_UNMERGED, 0), ("another", 1), ("", 1)])
def test_without_the_file_what_is_left_out_is_told(tmp_path: Path, digest: str, remarks: int) -> None:
    """Unless all of the model is merged, as the run's first learner said."""
    run = with_rounds(tmp_path / "run", 2, frozen=digest)
    exported = export_run(run.dir.path, tmp_path / "whole.safetensors")
    assert len(exported.remarks) == remarks
    for remark in exported.remarks:
        assert remark.startswith("left out: frozen parameters and buffers that are not merged") and "copy it" in remark


@pytest.mark.parametrize(
    ("merged", "more"), [(False, ", which are not merged. The run's first learner keeps"), (True, "")]
)
def test_tensors_that_another_machine_keeps_are_named_from_the_journal(tmp_path: Path, merged: bool, more: str) -> None:
    run = with_rounds(tmp_path / "run", 2, frozen="another", unmerged=("frozen.weight", "mask"))
    [remark] = export_run(run.dir.path, tmp_path / "whole.safetensors", merged=merged).remarks
    assert remark.startswith(f"left out: 'frozen.weight', 'mask'{more}") and ("copy it" in remark) != merged


def test_a_model_that_another_machine_renames_is_refused_from_the_journal(tmp_path: Path) -> None:
    """Its learners' folders are elsewhere: an export dropped the tensors of a fused qkv without a word."""
    run, out = with_rounds(tmp_path / "run", 1, renamed=("0.qkv.weight",)), tmp_path / "fused.safetensors"
    for merged in (False, True):
        with pytest.raises(ConfigError, match=r"such as '0\.qkv\.weight'.*--parameter-names"):
            export_run(run.dir.path, out, merged=merged)
    assert not out.exists()
    assert export_run(run.dir.path, out, parameter_names=True).remarks == ()


def test_what_is_left_out_on_purpose_is_named(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 2)
    keep(run, UNMERGED_THERE)
    exported = export_run(run.dir.path, tmp_path / "merged.safetensors", merged=True)
    assert exported.remarks == ("left out: 'embed', 'frozen.weight', 'mask', 'steps'",)
    assert load_file(exported.file).keys() == run.parameters.tensors_by_name().keys()


def test_the_best_model_is_whole_too(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 2)
    keep(run, UNMERGED_THERE)
    tensors = {name: torch.tensor(values) for name, values in run.parameters.tensors_by_name().items()}
    save_file(tensors, run.dir.best_model, metadata={"run": "small", "figure": "loss", "score": "0.5"})
    exported = export_kept(run.dir.path, tmp_path / "best.safetensors", "best")
    assert load_file(exported.file).keys() == tensors.keys() | UNMERGED_THERE.keys()
    assert exported.facts["score"] == "0.5" and len(exported.remarks) == 1


class Fused(nn.Module):
    """Keeps one tensor for q, k and v, and has three in its state_dict(), as torchtitan's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(2, 6, bias=False)
        self.out = nn.Linear(2, 2)
        self.register_state_dict_post_hook(self._split)

    @staticmethod
    def _split(module: nn.Module, held: dict[str, torch.Tensor], prefix: str, _: object) -> None:
        for name, part in zip("qkv", held.pop(f"{prefix}qkv.weight").chunk(3), strict=True):
            held[f"{prefix}w{name}.weight"] = part


def test_a_model_whose_state_dict_has_other_names_is_refused_with_them(tmp_path: Path) -> None:
    """Any program that reads the file by names of state_dict() would drop the tensors without a word."""
    run = with_rounds(tmp_path / "run", 1)
    folder = run.dir.learner("learner-1")
    model = nn.Sequential(Fused())
    assert "0.wq.weight" in model.state_dict()
    unmerged = UnmergedTensors(model, None, "refuse")
    unmerged.describe()
    assert unmerged.renamed == ("0.qkv.weight",) and unmerged.names == ()
    Saver(folder).keep_unmerged(unmerged.capture)
    wait_for(folder / UNMERGED)
    out = tmp_path / "fused.safetensors"
    with pytest.raises(ConfigError, match=r"such as '0\.qkv\.weight'.*--parameter-names"):
        export_run(run.dir.path, out)
    assert not out.exists()
    assert export_run(run.dir.path, out, parameter_names=True).file.exists()


@pytest.mark.parametrize("damage", [b"", b"no header", b"\xff" * 64])
def test_a_damaged_file_is_named(tmp_path: Path, damage: bytes) -> None:
    run = with_rounds(tmp_path / "run", 2)
    keep(run, UNMERGED_THERE).write_bytes(damage)
    with pytest.raises(ConfigError, match=r"cannot read .*unmerged.safetensors"):
        export_run(run.dir.path, tmp_path / "whole.safetensors")


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    run = with_rounds(tmp_path / "run", 2)
    path = keep(run, UNMERGED_THERE)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ConfigError, match="ends too early"):
        export_run(run.dir.path, tmp_path / "whole.safetensors")
    assert not (tmp_path / "whole.safetensors").exists()


def test_what_a_first_learner_keeps_is_what_is_exported(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.BatchNorm1d(2), nn.Linear(2, 1))
    run = with_rounds(tmp_path / "run", 1)
    folder = run.dir.learner("learner-1")
    Saver(folder).keep_unmerged(UnmergedTensors(model, None, "refuse").capture)
    found = load_file(wait_for(folder / UNMERGED))
    assert found.keys() == {"0.weight", "0.bias", "1.num_batches_tracked"}
    assert torch.equal(found["0.weight"], model[0].weight)


def wait_for(path: Path) -> Path:
    for thread in threading.enumerate():
        if thread.name == "atoll-unmerged":
            thread.join(60)
    return path
