"""Every element-wise kernel equals its plain NumPy twin bit for bit; norms equal a float64 sum over the same lanes."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import plain_loops
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import atoll
from atoll.numerics import codec_kernels, compiled, group_kernels, kernels
from atoll.numerics.arrays import DoubleArray, FloatArray, IndexArray
from atoll.numerics.compiled import read_only
from atoll.numerics.group_kernels import GROUP
from atoll.numerics.kernels import BLOCK, LANES

SIZES = [1, 7, LANES, LANES + 1, 1000, BLOCK, BLOCK + 3, 3 * BLOCK + 5]


def draw(size: int, seed: int = 0) -> FloatArray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(size) * 10.0 ** rng.uniform(-6, 6, size)).astype(np.float32)


def same_bits(a: FloatArray, b: FloatArray) -> bool:
    return a.tobytes() == b.tobytes()


def numpy_square_norm(row: FloatArray) -> float:
    padded = np.zeros(-(-row.size // LANES) * LANES)
    padded[: row.size] = row
    lanes: DoubleArray = np.add.accumulate((padded * padded).reshape(-1, LANES), axis=0)[-1]
    return float(np.add.accumulate(lanes)[-1])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 2, 3, GROUP])
@pytest.mark.parametrize("fresh", [True, False])
def test_accumulate_adds_in_the_order_given(size: int, count: int, fresh: bool) -> None:
    deltas = tuple(read_only(draw(size, m)) for m in range(GROUP))
    coefficients = draw(GROUP, 99).reshape(1, GROUP)
    out = draw(size, 50)
    expected = out.copy()
    for m in range(count):
        product = coefficients[0, m] * deltas[m]
        expected = product if fresh and m == 0 else expected + product
    kernels.accumulate(out, deltas, read_only(coefficients), count, fresh)
    assert same_bits(out, expected)


def test_accumulate_takes_each_row_with_its_own_coefficient() -> None:
    deltas = tuple(read_only(draw(12, m)) for m in range(GROUP))
    coefficients = draw(3 * GROUP, 7).reshape(3, GROUP)
    out = np.empty(12, np.float32)
    kernels.accumulate(out, deltas, read_only(coefficients), 2, True)
    rows = [delta.reshape(3, 4) for delta in deltas]
    assert same_bits(out, (coefficients[:, :1] * rows[0] + coefficients[:, 1:2] * rows[1]).ravel())


@pytest.mark.parametrize("size", SIZES)
def test_square_norms_are_the_lanes_in_order(size: int) -> None:
    values, out = draw(size), np.empty(1, np.float64)
    kernels.square_norms(read_only(values), out)
    assert out[0] == numpy_square_norm(values)
    assert out[0] == pytest.approx(math.fsum(float(v) ** 2 for v in values), rel=1e-12)


def test_square_norms_of_rows_do_not_depend_on_their_neighbours() -> None:
    values, out, alone = draw(5 * 200), np.empty(5, np.float64), np.empty(1, np.float64)
    kernels.square_norms(read_only(values), out)
    for row in range(5):
        kernels.square_norms(read_only(values[200 * row : 200 * row + 200]), alone)
        assert out[row] == alone[0]


@pytest.mark.parametrize("extreme", [3.4028235e38, 1e-45, 0.0])
def test_square_norms_of_extremes_are_finite(extreme: float) -> None:
    values, out = np.full(1000, extreme, np.float32), np.empty(1, np.float64)
    kernels.square_norms(read_only(values), out)
    assert out[0] == pytest.approx(1000 * float(np.float32(extreme)) ** 2, rel=1e-12)


@given(st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, 299))
@settings(max_examples=30, deadline=None)
def test_one_broken_value_breaks_the_norm(broken: float, place: int) -> None:
    values, out = np.ones(300, np.float32), np.empty(1, np.float64)
    values[place] = broken
    kernels.square_norms(read_only(values), out)
    assert not math.isfinite(out[0])


@pytest.mark.parametrize("size", SIZES)
def test_a_dot_product_is_the_lanes_in_order(size: int) -> None:
    a, b = draw(size), draw(size, 1)
    padded = np.zeros(-(-size // LANES) * LANES)
    padded[:size] = a.astype(np.float64) * b.astype(np.float64)
    lanes: DoubleArray = np.add.accumulate(padded.reshape(-1, LANES), axis=0)[-1]
    out = np.empty(1)
    kernels.block_dots(read_only(a), read_only(b), size, out)
    assert out[0] == float(np.add.accumulate(lanes)[-1])


@pytest.mark.parametrize("first", [0, 300_000])
@pytest.mark.parametrize("size", SIZES)
def test_a_sketch_adds_rows_with_the_sign_of_their_number(size: int, first: int) -> None:
    values, out = draw(size), np.zeros(16)
    kernels.sketch(read_only(values), out, first)
    padded = np.zeros(-(-size // 16) * 16)
    padded[:size] = values
    expected = np.zeros(16)
    for row, part in enumerate(padded.reshape(-1, 16)):
        mixed = (first + row + 1) * 0x9E3779B97F4A7C15 % 2**64
        mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 % 2**64
        expected += part if mixed >> 63 == 0 else -part
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("put", [0.0, -0.0, 3.4028235e38, 1e-45, math.nan, math.inf, -math.inf])
def test_bits_are_checked_and_added_by_xor(size: int, put: float) -> None:
    values = draw(size)
    values[size // 2] = put
    finite, mark = kernels.check_bits(read_only(values.view(np.uint32)))
    assert (finite, mark) == (np.isfinite(values).all(), np.bitwise_xor.reduce(values.view(np.uint32)))


@pytest.mark.parametrize("size", SIZES)
def test_blocks_have_dot_products_of_their_own(size: int) -> None:
    a, b = read_only(draw(size)), read_only(draw(size, 1))
    found, alone = np.empty(-(-size // 100)), np.empty(1)
    kernels.block_dots(a, b, 100, found)
    for k, start in enumerate(range(0, size, 100)):
        kernels.block_dots(a[start : start + 100], b[start : start + 100], 100, alone)
        assert found[k] == alone[0]


@pytest.mark.parametrize("size", SIZES)
def test_scale_rows(size: int) -> None:
    values, factors = draw(size * 2), draw(2, 1)
    expected: FloatArray = (values.reshape(2, size) * factors[:, np.newaxis]).ravel()
    kernels.scale_rows(values, read_only(factors))
    assert same_bits(values, expected)


@pytest.mark.parametrize("size", SIZES)
def test_nesterov_is_its_equation(size: int) -> None:
    theta, b, delta = draw(size, 1), draw(size, 2), draw(size, 3)
    lr, mu = np.float32(0.7), np.float32(0.9)
    next_b: FloatArray = mu * b + delta
    ahead: FloatArray = delta + mu * next_b
    next_theta: FloatArray = theta - lr * ahead
    found = np.empty_like(theta)
    kernels.nesterov(read_only(theta), found, b, read_only(delta), lr, mu)
    assert same_bits(b, next_b) and same_bits(found, next_theta)


@pytest.mark.parametrize("size", SIZES)
def test_sgd_is_its_equation(size: int) -> None:
    theta, delta, lr = draw(size, 1), draw(size, 3), np.float32(0.3)
    expected: FloatArray = theta - lr * delta
    found = np.empty_like(theta)
    kernels.sgd(read_only(theta), found, read_only(delta), lr)
    assert same_bits(found, expected)


REAL_USE = """
import numpy as np
from atoll import choices
from atoll.numerics import codec, compiled, deltas, filter, fragments, kernels, merge, moments, outer, screen
from atoll.protocol.messages import TensorSpec
from atoll.syncer import versions

INNER = {"nearest_bf16", "float_of", "bits_of", "absmax_scale", "absmax_scale_at", "topk_count"}
INNER |= {"add_group", "add_members", "square_norm", "absmax_decode_block", "absmax_decode_blocks"}
INNER |= {"absmax_decode_run", "absmax_reserved", "absmax_lacks_faults", "bf16_value", "bf16_add"}
# compiled into those that call them

def kinds():
    return {k.__name__: len(k.compiled.signatures) for k in compiled._KERNELS if k.__name__ not in INNER}

kernels.warm()
before = kinds()
assert set(before.values()) == {1} and len(before) == 27, before
fragment = fragments.make_plan([TensorSpec("t", (4, 2), "float32")], 1).fragments[0]
x, y = np.ones(8, np.float32), np.zeros(8, np.float32)
received = np.frombuffer(x.tobytes(), np.float32)
for rule in choices.MERGE.names():
    merge.merge(fragment, [x, received], [1.0, 2], y, rule)
factors = [np.full(1, 0.5, np.float32), np.ones(1, np.float32)]
merge.merge(fragment, [x, received], [1.0, 2], y, "rda-row", factors)
plan = fragments.make_plan([TensorSpec("t", (4, 2), "float32")], 1)
filter.Filter(plan).judge(0, ["a", "b", "c"], [x, received, y], x)
filter.Filter(plan).judge(0, ["a"], [received], x)
for name in ("nesterov", "sgd"):
    outer.make_outer(name, 0.7, 0.5).step(received, y, {"momentum": x}, received)
    outer.make_outer(name, 0.7, 0.5).step(y, y, {"momentum": x}, x)
    outer.make_outer(name, 0.7, 0.5).update({"momentum": x}, received, y)
    outer.make_outer(name, 0.7, 0.5).advance({"momentum": x}, received)
for by in map(codec.make_codec, choices.CODEC.names()):
    rows = ((4, 2),)
    body = np.zeros(by.nbytes(rows), np.uint8)
    by.encode(received, rows, body), by.encode_delta(codec.Delta(received, y), rows, body)
    by.encode_delta(codec.Delta(y, received, received, x.copy()), rows, body)
    given = np.frombuffer(body.tobytes(), np.uint8)
    by.check(given, rows), by.decode(given, rows, y)
    merge.merge(fragment, [deltas.EncodedDelta(by, fragment, one) for one in (body, given)], [1.0, 2], y, "mean")
codec.round_to_dtype(y, "bfloat16")
form = moments.NAMES.index("adam")
body = np.zeros(moments.moments_nbytes(codec.make_codec("int8"), fragment, [form]), np.uint8)
body[0] = form
bodies = [body, np.frombuffer(body.tobytes(), np.uint8), body]
moments.average_moments(fragment, bodies, [1.0, 2, 0.5], [*factors, factors[0]])
assert versions.is_finite(received) and versions.is_finite(y)
assert screen.NormScreen([8]).judge(0, received) is None
assert kinds() == before, kinds()
"""


def test_real_use_needs_no_kernel_that_warm_has_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_TEST_KERNELS", raising=False)
    subprocess.run([sys.executable, "-c", REAL_USE], check=True, timeout=100)


def halves_of(size: int) -> IndexArray:
    """Two runs, the second from the middle on."""
    return read_only(np.array([0, size // 2]))


def calls(size: int, seed: int) -> list[tuple[compiled.Kernel[..., object], tuple[object, ...]]]:
    """Every kernel that is called from outside, on values of all magnitudes; by the seed, one is not finite."""
    x, y, z, rest = (draw(size, 4 * seed + i) for i in range(4))
    x[size // 2] = (x[0], math.nan, math.inf, 0.0, 1e-45)[seed % 5]
    given, mean, rows = read_only(x), np.float32(0.3), np.float32([0.25])
    halves, bits, none = np.zeros(size, np.uint16), x.view(np.uint32), given[:0]
    starts = read_only(np.zeros(1, np.int64))
    found: list[tuple[compiled.Kernel[..., object], tuple[object, ...]]] = [
        (kernels.accumulate, (y, (given,) * GROUP, read_only(draw(GROUP).reshape(1, -1)), GROUP, seed % 2 == 0)),
        (kernels.square_norms, (given, np.empty(1))),
        (kernels.block_dots, (given, read_only(z), 5, np.empty(-(-size // 5)))),
        (kernels.sketch, (given, np.zeros(16), 0)),
        (kernels.check_bits, (read_only(bits),)),
        (kernels.scale_rows, (y, read_only(rows))),
        (kernels.take_mean, (read_only(np.stack([x, y, z])), read_only(np.array([0.5, 0.25, 0.25])), rest)),
        (kernels.merge_directions, (read_only(np.stack([x, y, z])), read_only(np.array([0.5, 0.25, 0.25])), rest, 1)),
        (kernels.weigh_directions, (np.array([1.0, 0.0, 3.0]), read_only(np.array([0.5, 0.25, 0.25])), np.empty(3))),
        (kernels.nesterov, (given, y, z, read_only(rest), mean, mean)),
        (kernels.sgd, (given, y, read_only(z), mean)),
        (kernels.nesterov_update, (read_only(z), given, y, mean, mean)),
        (kernels.nesterov_advance, (z, given, mean, mean, mean)),
        (codec_kernels.bf16_encode, (given, halves)),
        (codec_kernels.bf16_encode_delta, (given, read_only(y), halves)),
        (codec_kernels.fp32_decode, (given, y, starts)),
        (codec_kernels.bf16_decode, (read_only(bits.astype(np.uint16)), y.view(np.uint32), starts)),
        (codec_kernels.bf16_round, (bits,)),
    ]
    scales, fresh = read_only(draw(GROUP)), seed % 2 == 0
    words = tuple(read_only((one.view(np.uint32) >> 16).astype(np.uint16)) for one in (x, y, z, rest))
    found += [(group_kernels.bf16_add_group, (y, words, scales, count, fresh)) for count in (1, 3, GROUP)]
    rng, blocks = np.random.default_rng(seed), -(-size // codec_kernels.ABSMAX_BLOCK)
    noise, other = (rng.integers(0, 256, 4 * size + 200).astype(np.uint8) for _ in range(2))
    for width in (4, 8):
        head = (size, 3 * blocks + size, width, 0, blocks)
        found += [
            (codec_kernels.absmax_encode, (given, read_only(y), read_only(z), rest, noise, *head)),
            (codec_kernels.absmax_encode, (given, none, none, rest[:0], noise, *head)),
            (codec_kernels.absmax_check, (read_only(other), *head)),
            (codec_kernels.absmax_check, (read_only(other % 8), *head)),
            (codec_kernels.absmax_decode, (read_only(other), y, starts, *head[:3])),
            (
                group_kernels.absmax_add_group,
                (y, (read_only(other), read_only(noise)) * 2, scales, 3, fresh, 0, *head[:3]),
            ),
            (codec_kernels.absmax_decode, (read_only(other), y[: size // 2 * 2], halves_of(size), *head[:3])),
        ]
    row = (size, 3 * blocks + size, 0.3)
    return [
        *found,
        *(
            (codec_kernels.absmax_add_moment, (read_only(other % 64), np.ones(size), *row, squared, 1))
            for squared in (0, 1)
        ),
        (codec_kernels.topk_encode, (given, read_only(y), read_only(z), rest, noise, 0, 1)),
        (codec_kernels.topk_check, (read_only(other), size)),
        (codec_kernels.topk_check, (read_only(other // 8), size)),
        (codec_kernels.topk_decode, (read_only(other), y, starts, size)),
        (codec_kernels.topk_decode, (read_only(other), y[: size // 2 * 2], halves_of(size), size)),
    ]


def copied(arguments: tuple[object, ...]) -> tuple[object, ...]:
    """Arrays of their own, as read-only as they were; what shares memory in a call does so no more."""

    def copy(one: object) -> object:
        if not isinstance(one, np.ndarray):
            return tuple(map(copy, one)) if isinstance(one, tuple) else one
        return one.copy() if one.flags.writeable else read_only(one.copy())

    return tuple(map(copy, arguments))


@pytest.mark.parametrize("size", [1, 7, 65, plain_loops.MOST])
@pytest.mark.parametrize("seed", range(5))
def test_as_plain_python_a_kernel_gives_the_bits_that_it_gives_compiled(
    size: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most processes of tests run them so: tests/startup/plain_loops.py."""
    monkeypatch.setattr(compiled.Kernel, "__call__", plain_loops.run_plain)  # also for those that others call
    made = calls(size, seed)
    outside = {kernel for kernel, _ in made}
    inside = {"nearest_bf16", "float_of", "bits_of", "absmax_scale", "absmax_scale_at", "topk_count", "add_group"}
    inside |= {"add_members", "square_norm", "absmax_decode_block", "absmax_decode_blocks", "absmax_decode_run"}
    inside |= {"absmax_reserved", "absmax_lacks_faults", "bf16_value", "bf16_add"}
    assert {kernel.__name__ for kernel in compiled._KERNELS if kernel not in outside} == inside
    for kernel, arguments in made:
        if any(isinstance(one, np.ndarray) and not one.size for one in arguments[1:2]):
            continue  # half of a single value
        one, other = copied(arguments), copied(arguments)
        assert plain_loops.run_plain(kernel, *one) == kernel.compiled(*other), kernel.__name__
        for left, right in zip(one, other, strict=True):
            if isinstance(left, np.ndarray):
                assert left.tobytes() == right.tobytes(), kernel.__name__


def test_read_only_is_the_same_memory_and_leaves_the_original_writable() -> None:
    values = np.zeros(3, np.float32)
    view = read_only(values)
    values[0] = 5
    assert view[0] == 5 and not view.flags.writeable and values.flags.writeable


def test_nothing_but_a_call_of_a_kernel_loads_numba() -> None:
    words = "import sys, atoll.cli.train, atoll.numerics.merge; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", words], check=True, timeout=100)


def test_what_lies_compiled_is_known_without_numba(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernels.warm()
    files = [kernel.index_file for kernel in compiled._KERNELS]
    assert len(files) == 43 and (kernels.are_compiled() or not files[0].exists()), "another folder is used for them"
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    sources, numba, kept = {one.source for one in compiled._KERNELS}, tmp_path / "numba.py", tmp_path / "__pycache__"
    assert {one.name for one in sources} == {"kernels.py", "codec_kernels.py", "group_kernels.py"}
    kept.mkdir()
    copies = [tmp_path / one.name for one in sources]
    for file in (*copies, numba, *(kept / one.name for one in files)):
        file.touch()
    monkeypatch.setattr(compiled.Kernel, "source", property(lambda self: tmp_path / _source_name(self)))
    monkeypatch.setattr(compiled, "find_spec", lambda name: SimpleNamespace(origin=str(numba)))
    assert kernels.are_compiled()
    for newer in (*copies, numba):
        os.utime(newer, (2e9, 2e9))
        assert not kernels.are_compiled(), f"{newer.name} is newer than what was made of it"
        os.utime(newer, (1e9, 1e9))
    assert kernels.are_compiled()
    (kept / files[3].name).unlink()
    assert not kernels.are_compiled()


def test_kernels_in_a_folder_of_their_own_are_found_there(tmp_path: Path) -> None:
    """Those beside the source, as of an image, say nothing about the folder that NUMBA_CACHE_DIR names."""
    words = """
import numpy as np
from atoll.numerics import kernels
from atoll.numerics.compiled import read_only
assert not kernels.are_compiled() and not kernels.check_bits.index_file.exists()
kernels.check_bits(read_only(np.ones(2, np.uint32)))
assert kernels.check_bits.index_file.exists() and not kernels.are_compiled()
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "ATOLL_TEST_KERNELS": ""}
    subprocess.run([sys.executable, "-c", words], check=True, timeout=100, env=environment)


def test_kernels_of_an_installation_that_cannot_be_written_are_found_in_the_users_cache(tmp_path: Path) -> None:
    installed = tmp_path / "atoll"
    shutil.copytree(Path(atoll.__file__).parent, installed, ignore=shutil.ignore_patterns("__pycache__"))
    (installed / "numerics" / "__pycache__").touch()  # a file: also root can make none in it
    words = """
import numpy as np
from atoll.numerics import kernels
from atoll.numerics.compiled import read_only
assert not kernels.check_bits.index_file.exists()
kernels.check_bits(read_only(np.ones(2, np.uint32)))
assert kernels.check_bits.index_file.exists()
print(kernels.check_bits.index_file)
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "ATOLL_TEST_KERNELS": ""}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    environment.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, "-c", words]
    done = subprocess.run(command, check=True, timeout=100, env=environment, cwd=tmp_path, stdout=subprocess.PIPE)
    assert Path(done.stdout.decode().strip()).is_relative_to(tmp_path / "cache" / "numba")


def _source_name(kernel: compiled.Kernel[..., object]) -> str:
    return Path(kernel.__wrapped__.__code__.co_filename).name  # type: ignore[attr-defined]
