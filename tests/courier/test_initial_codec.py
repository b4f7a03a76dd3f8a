"""Version 0 in 2 bytes a value, between real couriers and a real syncer: bytes both ways, and equal bits everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.courier.conftest import Run, Stage, Training
from tests.courier.test_ranks import SHAPES as RANKS_SHAPES
from tests.courier.test_ranks import make_plain, make_ranks, make_whole, put_together, same
from tests.courier.test_service import stepping

from atoll.courier import body as module
from atoll.fabric.transfer import get_fragment_once

SHAPES = {"a": (60, 50), "b": (31,), "buffers/mean/v": (7,)}
VALUES = 60 * 50 + 31
BUFFERS = 7
WHOLE = 4 * (VALUES + BUFFERS)
CODED = 2 * VALUES + 4 * BUFFERS


def make_values(seed: int) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=noise) for name, shape in SHAPES.items()}


def round_all(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All but buffers."""
    return {n: v if n.startswith("buffers/") else v.to(torch.bfloat16).float() for n, v in values.items()}


async def check_holds(training: Training, expected: dict[str, torch.Tensor]) -> None:
    """In the model and in the base."""
    box = training.box
    assert box is not None
    await training.until(lambda: box.base_version.min() >= 0)
    for name, values in expected.items():
        assert torch.equal(training.parameters[name], values), name
    for part in box.plan.fragments:
        for piece, place in part.parts:
            rows = expected[piece.tensor.name].reshape(SHAPES[piece.tensor.name])
            rows = rows[piece.first : piece.first + piece.rows]
            assert np.array_equal(box.base(part.index)[place], rows.reshape(-1).numpy()), piece.label


def check_syncer(run: Run, expected: dict[str, torch.Tensor]) -> None:
    theta = run.theta()
    for name, values in expected.items():
        assert np.array_equal(theta[name.removeprefix("buffers/mean/")], values.numpy()), name


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(("codec", "size"), [("fp32", WHOLE), ("bf16", CODED)])
async def test_both_ways_take_as_many_bytes_as_stated_and_all_hold_the_same_bits(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, codec: str, size: int, large: bool
) -> None:
    if large:
        monkeypatch.setattr(module, "SMALL_BYTES", 0)
    run = await stage.run(learners=2, initial_codec=codec)
    own = make_values(1)
    first = stage.training(run, {name: values.clone() for name, values in own.items()})
    await first.join()
    assert run.service.server._intake.bytes_in == size
    expected = round_all(own) if codec == "bf16" else own
    second = stage.training(run, make_values(2), "learner-1")
    before = run.service.server._bodies_out
    await second.join()
    assert run.service.server._bodies_out - before == size
    check_syncer(run, expected)
    for training in (first, second):
        await check_holds(training, expected)
    [initial] = run.said("initial")
    if codec == "fp32":
        assert initial["text"] == "learner-0 gave the first parameters" and "relative_error" not in initial
    else:
        rounded, exact = (torch.cat([values[n].flatten() for n in SHAPES]).double() for values in (expected, own))
        assert initial["relative_error"] == pytest.approx(float((rounded - exact).norm() / exact.norm()), abs=1e-8)
        assert training.courier._memory is not None and training.courier._memory.bodies.count_lacking() == 0


async def test_a_reader_that_asks_for_no_form_gets_fp32(stage: Stage) -> None:
    run = await stage.run(initial_codec="bf16")
    first = stage.training(run, make_values(1))
    await first.join()
    for index, buffer in enumerate(run.service.begun.parameters.committed_buffers()):
        into = np.empty_like(buffer.values)
        version, _, digest = await get_fragment_once(run.url, index, into.view(np.uint8).data)
        assert (version, digest) == (0, buffer.digest) and np.array_equal(into, buffer.values)


async def test_later_versions_come_as_before_and_keep_no_form(stage: Stage) -> None:
    run = await stage.run(initial_codec="bf16", sync_every=2)
    first = stage.training(run, make_values(1))
    await first.join()
    await stepping(first, until=2, change=-0.3)
    assert all(buffer.coded is None for buffer in run.service.begun.parameters.committed_buffers())
    second = stage.training(run, make_values(2), "learner-1")
    await second.join()
    await second.until(lambda: is_head(run, second))


def is_head(run: Run, training: Training) -> bool:
    theta = run.theta()
    return all(
        np.array_equal(v.numpy(), theta[n.removeprefix("buffers/mean/")]) for n, v in training.parameters.items()
    )


async def test_a_model_that_made_steps_meanwhile_keeps_them(stage: Stage) -> None:
    """What the rounding took away is then in its first contribution."""
    run = await stage.run(initial_codec="bf16")
    own = make_values(1)
    first = stage.training(run, {name: values.clone() for name, values in own.items()})
    first.hire()
    await first.until(lambda: first.boundary is not None)
    first.step(-0.5)
    await first.until(lambda: first.boundary is not None and first.boundary.recovered)
    check_syncer(run, round_all(own))
    for name, values in own.items():
        assert torch.equal(first.parameters[name], values - 0.5), name


async def test_a_base_of_an_earlier_run_travels_as_it_is(stage: Stage) -> None:
    """It was adopted, not rounded: the run that goes on from it loses nothing."""
    run = await stage.run(initial_codec="bf16", sync_every=2)
    port = run.service.server.port
    first = stage.training(run, make_values(1))
    await first.join()
    await stepping(first, until=2, change=-0.3)
    await run.stop()
    other = await stage.run(port=port, initial_codec="bf16", sync_every=2)
    await first.until(lambda: bool(other.said("initial")))
    assert first.box is not None
    for part, buffer in zip(first.box.plan.fragments, other.service.begun.parameters.committed_buffers(), strict=True):
        assert buffer.coded is None and np.array_equal(buffer.values, first.box.base(part.index))


@pytest.mark.parametrize("large", [False, True])
async def test_ranks_give_and_take_it_in_as_few_bytes(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    if large:
        monkeypatch.setattr(module, "is_small", lambda part: False)
    run = await stage.run(learners=3, initial_codec="bf16", fragments=3)
    first = make_ranks(stage, run)
    await first.join()
    values = sum(int(np.prod(shape)) for shape in RANKS_SHAPES.values())
    assert run.service.server._intake.bytes_in == 2 * values
    expected = {name: rounded.numpy() for name, rounded in round_all(make_whole(0)).items()}
    assert same(run.theta(), expected) and same(put_together(first), expected)
    for number, (make, held) in enumerate(((make_ranks, values + 3), (make_plain, values)), start=1):
        other = make(stage, run, f"learner-{number}")
        for each in other.members:
            for parameter in each.parameters.values():
                parameter += 1.0
        before = run.service.server._bodies_out
        await other.join()
        assert run.service.server._bodies_out - before == 2 * held, "both ranks hold the 3 values of d"
        found = (
            put_together(other)
            if len(other.members) > 1
            else {name: parameter.numpy() for name, parameter in other.leader.parameters.items()}
        )
        assert same(found, expected)
