from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.learner.same import same

from atoll.digests import compute_digest
from atoll.learner import snapshot as module
from atoll.learner.packing import DTYPES, Packing
from atoll.learner.snapshot import (
    HEADER_LIMIT_BYTES,
    PIECE_BYTES,
    Snapshot,
    decode,
    digest,
    encode,
    ranged,
    read,
    size,
    write,
)
from atoll.protocol.errors import ConfigError, PeerError
from atoll.store import disk


def example() -> Snapshot:
    packing = Packing()
    packing.keep("model/scale", torch.tensor(0.5, dtype=torch.bfloat16))
    packing.keep("model/größe", torch.randn(3, 5))
    packing.keep("buffers/flags", torch.tensor([True, False, True]))
    packing.keep("buffers/none", torch.empty(0, 4, dtype=torch.int64))
    state = packing.pack(
        {"step": torch.tensor(3.0), "betas": (0.9, float("nan")), 7: [None, 2**70, "ü\ud800"]}, "optimizer"
    )
    return Snapshot(packing.tensors, {"optimizer": state}, packing.pack([torch.arange(9)], "rng"))


def whole(snapshot: Snapshot) -> bytes:
    header, parts = encode(snapshot)
    return b"".join([header, *parts])


def equal(one: Snapshot, other: Snapshot) -> bool:
    return same(dict(sorted(one.tensors.items())), dict(sorted(other.tensors.items()))) and one.meta == other.meta


def rewritten(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The same bytes with another header."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def refusal(data: bytes) -> str:
    with pytest.raises(PeerError) as caught:
        decode(data)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    return str(caught.value)


# ---- there and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [bytes, bytearray, lambda data: memoryview(bytearray(data))])
def test_encoded_bytes_decode_to_the_same_snapshot(kind: Callable[[bytes], Any]) -> None:
    snapshot = example()
    assert equal(decode(kind(whole(snapshot))), snapshot)


def test_equal_snapshots_are_equal_bytes() -> None:
    data = whole(example())
    assert whole(decode(data)) == data


def test_the_bytes_are_the_safetensors_format() -> None:
    snapshot = example()
    assert same(dict(sorted(safetensors.torch.load(whole(snapshot)).items())), dict(sorted(snapshot.tensors.items())))


def test_what_the_library_writes_is_read() -> None:
    snapshot = example()
    data = safetensors.torch.save(dict(snapshot.tensors), {"atoll": json.dumps(snapshot.meta), "by": "another"})
    assert equal(decode(data), snapshot)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_agrees_with_the_library(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (3, 16), dtype=torch.uint8).view(dtype)
    snapshot = Snapshot({"model/x": tensor, "model/odd": torch.ones(3, dtype=torch.uint8)}, {})
    data = whole(snapshot)
    assert same(safetensors.torch.load(data)["model/x"], tensor)
    assert same(decode(data).tensors["model/x"], tensor)


def test_encoding_copies_no_tensor() -> None:
    big = torch.zeros(2**22)
    snapshot = Snapshot({"model/big": big, "model/scalar": torch.tensor(2.0)}, {})
    header, parts = encode(snapshot)
    big[0] = 1.0
    assert bytes(parts[0][:4]) == b"\x00\x00\x80\x3f" and [part.nbytes for part in parts] == [2**24, 4]
    assert all(part.readonly and part.format == "B" for part in parts)
    assert size(header, parts) == len(header) + 2**24 + 4


def test_a_writable_buffer_is_used_in_place_and_others_are_copied() -> None:
    data = bytearray(whole(Snapshot({"model/x": torch.zeros(4)}, {})))
    frozen = decode(bytes(data))
    in_place = decode(data)
    data[-1] = 0x40
    assert in_place.tensors["model/x"][-1] == 2.0 and frozen.tensors["model/x"][-1] == 0.0


def test_tensors_are_aligned_even_in_a_buffer_that_is_not() -> None:
    snapshot = Snapshot(
        {"model/b": torch.ones(3, dtype=torch.uint8), "model/d": torch.ones(3, dtype=torch.float64)}, {}
    )
    data = whole(snapshot)
    shifted = memoryview(bytearray(b"-" + data))[1:]
    for buffer in (bytearray(data), shifted):
        again = decode(buffer)
        assert equal(again, snapshot)
        assert all(tensor.data_ptr() % tensor.itemsize == 0 for tensor in again.tensors.values())


def test_a_snapshot_cannot_be_given_other_tensors() -> None:
    held = {"model/x": torch.zeros(1)}
    snapshot = Snapshot(held, {})
    held.clear()
    assert list(snapshot.tensors) == ["model/x"]
    with pytest.raises(TypeError):
        snapshot.tensors["model/y"] = torch.zeros(1)  # type: ignore[index]
    with pytest.raises(AttributeError):
        snapshot.tensors = {}  # type: ignore[misc]


# ---- ranges ---------------------------------------------------------------------------------------------------------


@given(st.data())
def test_a_stream_can_begin_and_end_at_any_byte(data: st.DataObject) -> None:
    header, parts = encode(example())
    everything = b"".join([header, *parts])
    start = data.draw(st.integers(0, len(everything)))
    stop = data.draw(st.integers(start, len(everything)) | st.none())
    assert b"".join(ranged(header, parts, start, stop)) == everything[start:stop]


def test_pieces_are_small_and_copy_nothing() -> None:
    tensor = torch.arange(3 * PIECE_BYTES + 5, dtype=torch.uint8)
    header, parts = encode(Snapshot({"model/x": tensor}, {}))
    pieces = list(ranged(header, parts, len(header) + 1))
    assert [piece.nbytes for piece in pieces] == [PIECE_BYTES, PIECE_BYTES, PIECE_BYTES, 4]
    tensor[1] = 77
    assert pieces[0][0] == 77


@pytest.mark.parametrize(("start", "stop"), [(-1, None), (10**9, None), (5, 4), (0, 10**9)])
def test_bytes_that_do_not_exist_are_refused_before_the_first_piece(start: int, stop: int | None) -> None:
    header, parts = encode(example())
    with pytest.raises(PeerError, match="do not exist"):
        ranged(header, parts, start, stop)


def test_the_digest_is_that_of_the_whole() -> None:
    snapshot = example()
    assert digest(*encode(snapshot)) == compute_digest(whole(snapshot))


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_file_is_one_safetensors_file_and_is_read_back(tmp_path: Path) -> None:
    snapshot, path = example(), tmp_path / "state.safetensors"
    said = write(path, snapshot)
    assert equal(read(path), snapshot)
    assert said == compute_digest(path.read_bytes()) == digest(*encode(snapshot))
    assert safetensors.torch.load_file(path).keys() == snapshot.tensors.keys()
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.safetensors"]


def test_a_file_of_many_tensors_is_synced_by_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(disk, "datasync", synced.append)
    monkeypatch.setattr(disk, "PIECE_BYTES", 4096)
    monkeypatch.setattr(module, "PIECE_BYTES", 4096)
    small = {f"step-{number}": torch.ones(1) for number in range(1000)}
    write(tmp_path / "small.safetensors", Snapshot(small, {}))
    assert len(synced) <= 1 + (tmp_path / "small.safetensors").stat().st_size // 4096
    synced.clear()
    write(tmp_path / "large.safetensors", Snapshot({"large": torch.ones(8192)}, {}))
    assert len(synced) == 9, "and once at the end"


def test_a_file_is_written_where_there_is_no_fdatasync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fdatasync", raising=False)  # as on macOS
    write(tmp_path / "state.safetensors", Snapshot({"large": torch.ones(PIECE_BYTES // 4)}, {}))
    assert equal(read(tmp_path / "state.safetensors"), Snapshot({"large": torch.ones(PIECE_BYTES // 4)}, {}))


def test_a_write_that_fails_leaves_the_file_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot, path = example(), tmp_path / "state.safetensors"
    write(path, snapshot)

    def full(*_: object) -> Any:
        yield memoryview(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(module, "ranged", full)
    with pytest.raises(OSError, match="no space"):
        write(path, example())
    assert equal(read(path), snapshot)
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.safetensors"]


@pytest.mark.parametrize("content", [b"", b"short", None])
def test_a_file_that_is_none_is_refused_by_its_path(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "state.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot read the snapshot .*state\.safetensors: "):
        read(path)


# ---- damage ---------------------------------------------------------------------------------------------------------


def test_a_wrong_length_of_the_header_is_refused() -> None:
    data = whole(example())
    for length in (0, 1, len(data) - 7, HEADER_LIMIT_BYTES + 1, 2**64 - 1):
        assert "damaged" in refusal(length.to_bytes(8, "little") + data[8:])


@pytest.mark.parametrize("cut", [0, 7, 8, 100, -1])
def test_a_stream_that_ends_early_is_refused(cut: int) -> None:
    assert "damaged" in refusal(whole(example())[:cut])


def test_a_stream_that_goes_on_is_refused() -> None:
    assert "bytes of tensors instead of" in refusal(whole(example()) + b"\0")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda h: h["rng/0"].update(data_offsets=[8, 80]), "'rng/0' of (9,) lies at bytes 8 to 80"),
        (lambda h: h["rng/0"].update(data_offsets=h["model/größe"]["data_offsets"]), "lies at bytes"),
        (lambda h: h["rng/0"].update(data_offsets=[72, 0]), "lies at bytes"),
        (lambda h: h["rng/0"].update(data_offsets=[0, 2**62]), "lies at bytes"),
        (lambda h: h["rng/0"].update(data_offsets=[0]), "has no place"),
        (lambda h: h["rng/0"].update(data_offsets=[-72, 0]), "has no place"),
        (lambda h: h["rng/0"].update(data_offsets=[0.0, 72.0]), "has no place"),
        (lambda h: h["rng/0"].update(data_offsets="all"), "has no place"),
        (lambda h: h.update({"rng/0": 5}), "has no place"),
        (lambda h: h["rng/0"].update(shape=[10]), "'rng/0' of (10,) lies at bytes 0 to 72"),
        (lambda h: h["rng/0"].update(shape=[-9]), "has no shape"),
        (lambda h: h["rng/0"].update(shape=[True]), "has no shape"),
        (lambda h: h["rng/0"].update(shape=[1] * 65), "has no shape"),
        (lambda h: h["rng/0"].update(shape=[2**62, 2**62]), "lies at bytes"),
        (lambda h: h["rng/0"].update(shape=None), "has no shape"),
        (lambda h: h["buffers/none"].update(shape=[0, 2**62, 2**62]), "cannot be a tensor"),
        (lambda h: h["rng/0"].update(dtype="F64 "), "no type that is known: 'F64 '"),
        (lambda h: h["rng/0"].update(dtype=[]), "no type that is known"),
        (lambda h: h["rng/0"].update(dtype="F32"), "lies at bytes"),
        (lambda h: h.pop("rng/0"), "lies at bytes"),
        (lambda h: h.pop("__metadata__"), "no snapshot of Atoll's"),
        (lambda h: h.update(__metadata__=[]), "no snapshot of Atoll's"),
        (lambda h: h["__metadata__"].update(atoll=5), "no snapshot of Atoll's"),
        (lambda h: h["__metadata__"].update(atoll="[]"), "its state is no JSON object"),
        (lambda h: h["__metadata__"].update(atoll="{"), "its state is no JSON object"),
        (lambda h: h["__metadata__"].update(atoll='{"format": 2}'), "of format 2, this version reads 1"),
        (lambda h: h["__metadata__"].update(atoll='{"format": 1}'), "has not the parts"),
        (lambda h: h["__metadata__"].update(atoll='{"format":1,"states":[],"rng":null}'), "has not the parts"),
        (lambda h: h["__metadata__"].update(atoll='{"format":1,"states":{"a":NaN},"rng":null}'), "a bare nan"),
        (lambda h: h["__metadata__"].update(atoll='{"format":1,"states":{},"rng":{"array":"x"}}'), "'array' tag"),
        (lambda h: h["__metadata__"].update(atoll='{"format":1,"states":{"a":' + "[" * 10**5), "no JSON object"),
        (lambda h: h["__metadata__"].update(atoll='{"format":' + "1" * 5000 + "}"), "no JSON object"),
    ],
)
def test_a_header_that_lies_is_refused(change: Callable[[dict[str, Any]], object], said: str) -> None:
    data = whole(example())
    assert equal(decode(rewritten(data, lambda header: None)), decode(data)), "the change alone is what is refused"
    assert said in refusal(rewritten(data, change))


def test_a_truth_value_is_true_or_false() -> None:
    data = bytearray(whole(Snapshot({"buffers/flags": torch.tensor([True, False])}, {})))
    data[-1] = 2
    assert "neither true nor false" in refusal(bytes(data))


@given(st.data())
def test_damaged_bytes_are_a_snapshot_or_a_peers_mistake(data: st.DataObject) -> None:
    damaged = bytearray(whole(example()))
    header = 8 + int.from_bytes(damaged[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, 8) | st.integers(0, header) | st.integers(0, len(damaged)))
        kind = data.draw(st.sampled_from(["change", "cut", "insert"]))
        some = data.draw(
            st.binary(min_size=1, max_size=6) | st.sampled_from([b"0", b"9", b'"', b"]", b"{", b"\\", b","])
        )
        damaged[place : place + (0 if kind == "insert" else len(some))] = b"" if kind == "cut" else some
    with suppress(PeerError):
        read_back = decode(bytes(damaged))
        assert equal(decode(whole(read_back)), read_back)


@given(st.binary(max_size=200))
def test_any_bytes_at_all_are_refused(data: bytes) -> None:
    refusal(data)
    refusal(len(data).to_bytes(8, "little") + data)


def test_refusing_takes_no_memory_for_what_a_header_claims() -> None:
    claims = rewritten(whole(example()), lambda h: h["rng/0"].update(shape=[2**40], data_offsets=[0, 2**43]))
    long = (2**31).to_bytes(8, "little") + claims[8:]
    tracemalloc.start()
    try:
        for data in (claims, long):
            refusal(data)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_header_too_long_to_be_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEADER_LIMIT_BYTES", 4096)
    with pytest.raises(ConfigError, match="more than 4096: too many tensors, or long lists"):
        encode(Snapshot({}, {"extra/x": list(range(4096))}))
