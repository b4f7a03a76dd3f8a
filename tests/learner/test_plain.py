from __future__ import annotations

import json
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.learner.same import same

from atoll.learner.packing import DTYPES, LARGE_BYTES, Packing, Unpacking
from atoll.protocol.errors import ConfigError, PeerError

HOST = torch.device("cpu")
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=()))
KEYS = PLAIN | st.tuples(st.integers(), st.text())
TENSORS = st.sampled_from([torch.tensor(1.5), torch.arange(6).reshape(2, 3).T, torch.empty(0, 3), torch.ones(2).half()])


def nested(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mapping = st.dictionaries(KEYS, inside, max_size=4)
    counter = st.dictionaries(KEYS, st.integers(), max_size=4).map(Counter)
    return (
        st.lists(inside, max_size=4)
        | st.lists(inside, max_size=4).map(tuple)
        | mapping
        | counter
        | mapping.map(OrderedDict)
    )


def there_and_back(value: object) -> Any:
    packing = Packing()
    text = json.dumps(packing.pack(value, "it"), allow_nan=False)
    packing.settle()
    return Unpacking(packing.tensors, HOST).unpack(json.loads(text))


def refusal(value: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Packing().pack(value, "extra/it")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@given(st.recursive(PLAIN | TENSORS, nested, max_leaves=20))
def test_every_nested_plain_value_comes_back_as_it_was(value: object) -> None:
    assert same(there_and_back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        -0.0,
        float("inf"),
        float("-inf"),
        struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0],
        5e-324,
        0.1 + 0.2,
        2**63,
        -(2**63) - 1,
        -(10**5000),
        {0: "int", "0": "text", (0,): "tuple", None: "none", 0.5: "float"},
        {"tensor": ["name", [], "host"]},
        {"tuple": [1]},
        {True: 1},
        "\ud800 half a character",
        Counter({3: 2}),
        np.float32(0.1),
        np.arange(3, dtype=np.uint32),
        np.array(7, dtype=np.int64),
        np.zeros((0, 2)),
        {np.int64(3): 1},
    ],
    ids=lambda value: repr(value)[:30].encode("ascii", "replace").decode() if not isinstance(value, int) else "int",
)
def test_the_odd_ones_come_back_as_they_were(value: object) -> None:
    assert same(there_and_back([value]), [value])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_of_tensor_survives_bit_for_bit(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (24,), dtype=torch.uint8)
    tensor = raw.view(dtype)
    for shaped in (tensor, tensor.reshape(3, -1).T, tensor[::2], tensor[0], tensor[:0], tensor[:1].expand(3)):
        assert same(there_and_back(shaped), shaped)


def test_a_tensor_that_torch_has_not_conjugated_yet_is_kept_as_what_it_stands_for() -> None:
    lazy = torch.tensor([1 + 2j]).conj()
    assert lazy.is_conj() and there_and_back(lazy).resolve_conj().tolist() == [1 - 2j]


def test_a_layout_in_memory_comes_back_too() -> None:
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    back = there_and_back(tensor)
    assert back.stride() == tensor.stride() and same(back, tensor)


def test_two_references_to_one_tensor_stay_that() -> None:
    tensor = torch.ones(3)
    one, other, equal = there_and_back([tensor, tensor, tensor.clone()])
    assert one is other and one is not equal


def test_what_is_packed_is_a_copy_and_so_is_what_is_unpacked() -> None:
    packing, tensor, array = Packing(), torch.ones(3), np.ones(3)
    packed = packing.pack([tensor, array], "it")
    tensor.zero_()
    array[:] = 0
    first = Unpacking(packing.tensors, HOST).unpack(packed)
    assert same(first, [torch.ones(3), np.ones(3)])
    first[0].zero_()
    first[1][:] = 0
    assert same(Unpacking(packing.tensors, HOST).unpack(packed), [torch.ones(3), np.ones(3)])


def test_names_say_the_way_and_never_collide() -> None:
    packing = Packing()
    packing.pack(
        {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}, "\ud800": torch.ones(2), "\\ud800": torch.ones(3)}, "it"
    )
    assert list(packing.tensors) == ["it/a/b", "it/a/b~2", "it/\\ud800", "it/\\ud800~2"]
    assert [tensor.sum().item() for tensor in packing.tensors.values()] == [0, 1, 2, 3]


def test_a_thing_that_is_not_plain_is_refused_by_its_way() -> None:
    assert refusal({"steps": [1, lambda: 0]}) == (
        "'extra/it/steps/1' is a function, which a snapshot cannot hold: only tensors, numbers, text and lists, "
        "tuples and dicts of them; leave it out of state_dict()"
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "is a object"),
        (defaultdict(int), "is a defaultdict"),
        (namedtuple("Pair", "a b")(1, 2), "is a Pair"),
        (b"bytes", "is a bytes"),
        ({1, 2}, "is a set"),
        (1j, "is a complex"),
        (torch.float32, "is a dtype"),
        (torch.Size([1]), "is a Size"),
        (torch.eye(2).to_sparse(), "is a torch.sparse_coo"),
        (torch.empty(2, device="meta"), "has no memory yet"),
        (torch.zeros(2, dtype=torch.complex128), "is complex128"),
        (np.array(["text"]), "numpy array of <U4"),
        (np.array([object()]), "numpy array of object"),
        (np.zeros(2, dtype=">f4"), "numpy array of >f4"),
        ({torch.zeros(1): 1}, "has a tensor as a key"),
        ("line\nbreak", None),
        ({"line\nbreak": object()}, r"'extra/it/line\nbreak'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused_and_how(value: object, said: str | None) -> None:
    if said is None:
        assert there_and_back(value) == value
    else:
        assert said in refusal(value)


def test_a_list_that_holds_itself_is_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    assert "nested more than 100 deep" in refusal(endless)


def test_a_value_as_deep_as_is_allowed_comes_back() -> None:
    value: object = ()
    for _ in range(99):
        value = {"deeper": value}
    assert same(there_and_back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"tuple": [], "dict": []},
        {"unknown": 1},
        {"tuple": "text"},
        {"dict": [1]},
        {"dict": [[1, 2, 3]]},
        {"dict": [[[], 1]]},
        {"dict": None},
        {"int": 5},
        {"int": "no number"},
        {"float": "00"},
        {"float": None},
        {"tensor": "one"},
        {"tensor": ["two", [], "host"]},
        {"tensor": ["one", [0], "host"]},
        {"tensor": ["one", [0, 0], "host"]},
        {"tensor": ["one", [1, "0"], "host"]},
        {"tensor": ["one", [], "cuda:7"]},
        {"tensor": [["one"], [], "host"]},
        {"array": "two"},
        {"array": []},
        {"array": "half"},
        {"scalar": 1},
        float("inf"),
        {"tuple": [float("nan")]},
    ],
    ids=str,
)
def test_what_was_never_packed_is_a_peers_mistake(value: Any) -> None:
    held = {"one": torch.ones(2, 2), "half": torch.ones(2, dtype=torch.bfloat16)}
    for device in (None, HOST):
        with pytest.raises(PeerError):
            Unpacking(held, device).unpack(value)


def test_an_endless_nest_of_a_peers_ends_early() -> None:
    value: Any = []
    for _ in range(5000):
        value = {"tuple": [value]}
    with pytest.raises(PeerError, match="nested more than 100 deep"):
        Unpacking({}).unpack(value)


def test_many_references_to_one_tensor_take_its_memory_once() -> None:
    value: Any = [{"array": "one"}, {"array": "one"}, {"tensor": ["one", [], "host"]}, {"tensor": ["one", [], "host"]}]
    a, b, c, d = Unpacking({"one": torch.ones(4)}, HOST).unpack(value)
    assert a is b and c is d


def test_large_tensors_are_copied_when_it_is_settled_and_not_before_training_goes_on() -> None:
    packing, large = Packing(), torch.arange(LARGE_BYTES // 4 + 3, dtype=torch.float32)
    packed = packing.pack({"large": large, "again": large, "turned": large[: LARGE_BYTES // 4].view(2, -1).T}, "it")
    packing.settle()
    expected = large.clone()
    large.zero_()
    back = Unpacking(packing.tensors).unpack(packed)
    assert torch.equal(back["large"], expected) and back["again"] is back["large"]
    assert torch.equal(back["turned"], expected[: LARGE_BYTES // 4].view(2, -1).T)
