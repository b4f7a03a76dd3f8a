"""Runs whose versions come down by a lossy codec: what a syncer has, and what others make of cuts and journal."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from tests.store.written import OUTER, P, WrittenRun, begun, well, with_rounds, wrong

from atoll.config import Outer
from atoll.digests import compute_digest
from atoll.numerics.codec import body_nbytes, make_codec
from atoll.numerics.updates import decode_update
from atoll.protocol.messages import TensorSpec
from atoll.store.cuts import BadCut
from atoll.store.disk import LocalDisk
from atoll.store.rebuild import load_newest
from atoll.store.writer_lease import claim
from atoll.syncer.outer_state import Overflow
from atoll.syncer.parameters import Parameters
from atoll.syncer.recovery import read_cut_state, recover
from atoll.syncer.run_store import RunStore

LOSSY = ("bf16", "int8", "int4", "topk")
each = pytest.mark.parametrize("codec", LOSSY)
TENSORS = (
    TensorSpec("embed", (6, 70), "float32", embedding=True),
    TensorSpec("blocks.0.weight", (5, 64), "bfloat16"),
    TensorSpec("blocks.1.weight", (4, 64), "float32"),
    TensorSpec("buffers/mean/blocks.1.norm", (9,), "float32"),
    TensorSpec("head.bias", (7,), "float32"),
)


def bits(parameters: Parameters, *, feedback: bool = True) -> dict[str, bytes]:
    arrays = parameters.hold_arrays()
    for buffer in parameters.committed_buffers():
        buffer.readers -= 1
    return {name: values.tobytes() for name, values in arrays.items() if feedback or not name.startswith("feedback")}


def recovered(run: WrittenRun) -> dict[str, bytes]:
    found = recover(run.dir, disk=LocalDisk())
    assert found is not None and found.parameters is not None
    return bits(found.parameters, feedback=False)


def rebuilt(run: WrittenRun) -> dict[str, bytes]:
    model = load_newest(run.dir).model
    return {name: values.tobytes() for name, values in model._arrays.items()}


@each
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.faults) for seed in range(2, 6))])
def test_whatever_happens_cuts_and_journal_give_theta_and_outer_state_bit_for_bit(
    tmp_path: Path, codec: str, seed: int
) -> None:
    """Rounds, void ones, resets, other outer settings, rollbacks, new terms, cuts, in any order."""
    dice = random.Random(seed)
    run = begun(tmp_path, version_codec=codec, tensors=TENSORS)
    for name in run.islands:
        run.lease(name, 128)
    for _ in range(P):
        run.round()
    cut = run.cut()
    for _ in range(25):
        match dice.choice(["round"] * 5 + ["pass", "overflow", "outer", "rollback", "term", "cut"]):
            case "round":
                run.round()
            case "pass":
                run.pass_over()
            case "overflow":
                run.overflow()
            case "outer":
                run.set_outer(lr=dice.choice([1.2, 1.5, 2.0]), momentum=dice.choice([0.0, 0.5, 0.9]))
            case "rollback" if run.history.committed > cut and not run.history.is_rolled_back(cut + 1):
                run.roll_back(cut)
            case "term":
                run.reign()
            case _:
                if run.history.committed > cut:
                    cut = run.cut()
        assert recovered(run) == bits(run.parameters, feedback=False)
    assert rebuilt(run) == bits(run.parameters, feedback=False)
    run.end()
    assert not well(run).remarks


@each
def test_what_the_journal_keeps_is_what_theta_was_lowered_by(tmp_path: Path, codec: str) -> None:
    run = with_rounds(tmp_path, 1, version_codec=codec, tensors=TENSORS)
    part, by = run.parameters.plan.fragments[1], make_codec(codec)
    before = run.parameters.committed_buffers()[1].values.copy()
    delta = np.linspace(-1, 1, part.size).astype(np.float32)
    run.parameters.stage_merge(1, [delta], [1.0], bases=[0])
    kept = np.frombuffer(run.parameters.round_payload(1), np.uint8)
    assert kept.size == body_nbytes(by, part)
    run.parameters.commit_version(1, 1, 1)
    now = run.parameters.committed_buffers()[1].values
    assert now.tobytes() == (before - decode_update(by, part, kept)).tobytes()


def test_feedback_is_in_cuts_and_starts_at_zero_in_a_new_term(tmp_path: Path) -> None:
    run = with_rounds(tmp_path, 2 * P, version_codec="int4", tensors=TENSORS)
    cut = run.cut()
    there = read_cut_state(run.dir.cuts, cut)
    assert there.parameters is not None and bits(there.parameters) == bits(run.parameters)
    feedback = {name: values for name, values in bits(run.parameters).items() if name.startswith("feedback-")}
    assert len(feedback) == P and all(np.frombuffer(one, np.float32).any() for one in feedback.values())
    run.journal.close()
    assert claim(run.dir.journal, 2)
    store = RunStore(run.dir, FakeLease(2))  # type: ignore[arg-type]
    assert store.found_on_disk is not None and store.found_on_disk.parameters is not None
    now = bits(store.found_on_disk.parameters)
    assert not any(np.frombuffer(now[name], np.float32).any() for name in feedback)
    assert {name: now[name] for name in now.keys() - feedback.keys()} == bits(run.parameters, feedback=False)
    store.close()


class FakeLease:
    def __init__(self, term: int) -> None:
        self.term = term

    def beat(self) -> None: ...

    def release(self) -> None: ...

    def fenced(self) -> bool:
        return False


def test_a_void_round_changes_nothing_and_one_that_overflows_starts_its_fragment_anew(tmp_path: Path) -> None:
    run = with_rounds(tmp_path, 2 * P, version_codec="int4", tensors=TENSORS)
    before = bits(run.parameters)
    with pytest.raises(ValueError, match="weight"):
        run.parameters.stage_merge(0, [np.ones(run.parameters.plan.fragments[0].size, np.float32)], [0.0], bases=[0])
    assert bits(run.parameters) == before
    with pytest.raises(Overflow):
        run.parameters.stage_merge(
            0, [np.full(run.parameters.plan.fragments[0].size, 3e38, np.float32)], [1.0], bases=[0]
        )
    now = bits(run.parameters)
    changed = {name for name in now if now[name] != before[name]}
    assert changed == {"momentum-000", "feedback-000"}
    assert not any(np.frombuffer(now[name], np.float32).any() for name in changed)


def test_behind_a_rollback_feedback_starts_at_zero(tmp_path: Path) -> None:
    run = with_rounds(tmp_path, P, version_codec="int4", tensors=TENSORS)
    cut = run.cut()
    run.round()
    run.roll_back(cut)
    state = bits(run.parameters)
    assert not any(np.frombuffer(state[f"feedback-{f:03d}"], np.float32).any() for f in range(P))
    run.round()
    run.end()
    assert not well(run).remarks


@pytest.mark.parametrize(("kept", "asked"), [("int4", "fp32"), ("fp32", "int4")])
def test_the_feedback_of_another_codec_is_refused(tmp_path: Path, kept: str, asked: str) -> None:
    run = with_rounds(tmp_path, P, version_codec=kept, tensors=TENSORS)

    def claim_other(state: object) -> object:
        history = state.history  # type: ignore[attr-defined]
        begun = replace(history.begun, settings=replace(history.begun.settings, version_codec=asked))
        return replace(state, history=msgspec.structs.replace(history, begun=begun))  # type: ignore[type-var]

    cut = run.cut(claim_other)  # type: ignore[arg-type]
    with pytest.raises(BadCut, match="feedback"):
        read_cut_state(run.dir.cuts, cut)


@each
def test_a_payload_of_another_length_is_named(tmp_path: Path, codec: str) -> None:
    run = with_rounds(tmp_path, P, version_codec=codec, tensors=TENSORS)
    run.cut()
    size = run.parameters.plan.fragments[0].size
    run.parameters.stage_merge(0, [np.ones(size, np.float32)], [1.0], bases=[1])
    short = run.parameters.round_payload(0)[:-1]
    run.parameters.round_payload = lambda fragment: short  # type: ignore[method-assign]
    run.round()
    assert f"a body of {len(short)} bytes came, {codec} of {size} values" in wrong(run)


def test_a_scale_that_is_not_finite_is_named(tmp_path: Path) -> None:
    run = with_rounds(tmp_path, P, version_codec="int4", outer={**OUTER, "merge": "mean"})
    run.cut()
    whole = run.parameters.round_payload

    def spoilt(fragment: int) -> memoryview:
        data = bytearray(whole(fragment))
        data[1] = 0x7F
        return memoryview(data)

    run.parameters.round_payload = spoilt  # type: ignore[method-assign]
    run.round()
    assert "a scale that is not finite" in wrong(run)


def test_a_model_of_bytes_alone_follows_the_syncer(tmp_path: Path) -> None:
    """Whoever holds Θ and gets the bytes needs to know neither optimizer, momentum, resets nor other settings."""
    run = with_rounds(tmp_path, P, version_codec="int4", tensors=TENSORS)
    held = run.parameters.committed_buffers()[0].values.copy()
    part, by = run.parameters.plan.fragments[0], make_codec("int4")
    for change in (lambda: None, run.overflow, lambda: run.set_outer(lr=0.1, momentum=0.9), run.reign):
        change()
        while run.history.committed % P:
            run.round()
        run.round()
        kept = run.parameters.committed_buffers()[0]
        held -= decode_update(by, part, LAST[0])
        assert held.tobytes() == kept.values.tobytes()


LAST: dict[int, np.ndarray] = {}


@pytest.fixture(autouse=True)
def note_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the journal got last, by fragment."""
    whole = Parameters.round_payload

    def noted(self: Parameters, fragment: int) -> memoryview:
        data = whole(self, fragment)
        LAST[fragment] = np.frombuffer(bytes(data), np.uint8)
        return data

    monkeypatch.setattr(Parameters, "round_payload", noted)


def test_the_default_is_as_it_was(tmp_path: Path) -> None:
    """fp32: no feedback, and the journal keeps outer gradients."""
    plain = Parameters(begun(tmp_path).parameters.plan, Outer())
    assert not plain.has_feedback and set(bits(plain)) == {
        f"{kind}-{f:03d}" for kind in ("theta", "momentum") for f in range(P)
    }


# ---- who is a few versions behind -----------------------------------------------------------------------------------


@each
def test_k_steps_lead_to_the_bits_of_the_whole(tmp_path: Path, codec: str) -> None:
    run = with_rounds(tmp_path, P, version_codec=codec, tensors=TENSORS)
    by, parameters = make_codec(codec), run.parameters
    held = {
        f: (parameters.committed_buffers()[f].version, parameters.committed_buffers()[f].values.copy())
        for f in range(P)
    }
    for _ in range(6 * P):
        run.round()
        for fragment, (have, values) in held.items():
            part = parameters.plan.fragments[fragment]
            served = parameters.serve_fragment(fragment, have)
            served.release()
            k, size = served.version - have, body_nbytes(by, part)
            if 0 < k * size < 4 * part.size:
                assert len(served.steps) == k, "fewer bytes than the whole"
                now = values.copy()
                for mark, step in served.steps:
                    assert compute_digest(step) == mark
                    now -= decode_update(by, part, np.frombuffer(step, np.uint8))
                assert compute_digest(now.view(np.uint8).data) == served.digest
            else:
                assert not served.steps and served.body == [served.data]


def test_steps_are_kept_within_the_size_of_the_fragment_and_a_number(tmp_path: Path) -> None:
    run = with_rounds(tmp_path, 12 * P, version_codec="int4", tensors=TENSORS)
    for part, versions in zip(run.parameters.plan.fragments, run.parameters._versions, strict=True):
        size, steps = 4 * part.size, versions._steps
        assert size / 2 < sum(step.data.nbytes for step in steps) < size
        assert [step.version for step in steps] == list(range(steps[0].version, 13))


def test_a_rollback_is_no_step_and_neither_is_a_version_that_is_not_kept(tmp_path: Path) -> None:
    run = with_rounds(tmp_path, P, version_codec="int4", tensors=TENSORS)
    cut = run.cut()
    for _ in range(P):
        run.round()
    assert len(run.parameters.serve_fragment(0, 1).steps) == 1
    for have in (-1, 2, 3, 10**12):
        assert not run.parameters.serve_fragment(0, have).steps
    run.roll_back(cut)
    assert not run.parameters.serve_fragment(0, 2).steps
    run.round()
    assert not run.parameters.serve_fragment(0, 2).steps and len(run.parameters.serve_fragment(0, 3).steps) == 1


def test_with_fp32_every_version_is_whole(tmp_path: Path) -> None:
    run = with_rounds(tmp_path, 2 * P)
    assert not run.parameters.serve_fragment(0, 1).steps
