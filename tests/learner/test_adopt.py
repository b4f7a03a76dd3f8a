from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.learner.boundary import adopt


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.tensor([1.0, 2.0], dtype=dtype, requires_grad=True), torch.tensor([[4.0]], dtype=dtype)]


NEW = [torch.tensor([3.0, 6.0]), torch.tensor([[0.0]])]
READ = [torch.tensor([0.5, 0.5]), torch.tensor([[5.0]])]


def test_overwrite_takes_the_new_values() -> None:
    own = parameters()
    adopt(own, NEW, "overwrite")
    assert own[0].tolist() == [3.0, 6.0] and own[1].tolist() == [[0.0]]


def test_blend_keeps_a_share_of_the_own() -> None:
    own = parameters()
    adopt(own, NEW, "blend", blend=0.25)
    assert own[0].tolist() == [0.25 * 1 + 0.75 * 3, 0.25 * 2 + 0.75 * 6]
    assert own[1].tolist() == [[1.0]]


@pytest.mark.parametrize(("blend", "expected"), [(1.0, [1.0, 2.0]), (0.0, [3.0, 6.0])])
def test_blend_at_its_ends(blend: float, expected: list[float]) -> None:
    own = parameters()
    adopt(own, NEW, "blend", blend=blend)
    assert own[0].tolist() == expected


def test_carry_adds_what_was_learned_since_the_copy() -> None:
    own = parameters()
    adopt(own, NEW, "carry", read=READ)
    assert own[0].tolist() == [3.0 + 0.5, 6.0 + 1.5]
    assert own[1].tolist() == [[-1.0]]


def test_the_inputs_are_left_alone() -> None:
    new, read = [tensor.clone() for tensor in NEW], [tensor.clone() for tensor in READ]
    for rule in ("blend", "carry"):
        adopt(parameters(), new, rule, blend=0.5, read=read)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(new + read, NEW + READ, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    own, new, read = torch.randn(1000).to(dtype), torch.randn(1000), torch.randn(1000)
    for rule, exact in (
        ("overwrite", new),
        ("blend", 0.3 * own.float() + 0.7 * new),
        ("carry", own.float() - read + new),
    ):
        mine = own.clone()
        adopt([mine], [new], rule, blend=0.3, read=[read])  # type: ignore[arg-type]
        assert mine.dtype == dtype
        assert torch.equal(mine, exact.to(dtype)), rule


def test_non_contiguous_and_mixed_parameters_go_together() -> None:
    base = torch.zeros(3, 2)
    own = [base.T, torch.zeros(2, dtype=torch.bfloat16), torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)]
    new = [torch.arange(6.0).view(2, 3), torch.tensor([1.0, 2.0]), torch.arange(48.0).view(4, 3, 2, 2)]
    for rule in ("overwrite", "carry"):
        adopt(own, new, rule, read=[tensor.float() for tensor in own])  # type: ignore[arg-type]
        assert torch.equal(base, torch.arange(6.0).view(2, 3).T)
        assert all(torch.equal(mine.float(), values) for mine, values in zip(own, new, strict=True))


class CopiedTypes(TorchDispatchMode):
    """The types that each call of `_foreach_copy_` wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[set[torch.dtype]] = []

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call is torch.ops.aten._foreach_copy_.default:
            self.written.append({tensor.dtype for tensor in args[0]})
        return call(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", ["overwrite", "blend", "carry"])
def test_one_call_copies_to_one_type_as_older_torch_cannot_mix_them_on_cuda(rule: str) -> None:
    own = [torch.zeros(2, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.bfloat16)]
    new = [torch.full((2,), float(place)) for place in range(3)]
    with CopiedTypes() as copied:
        adopt(own, new, rule, read=[torch.zeros(2)] * 3 if rule == "carry" else None)
    assert sorted(copied.written, key=str) == [{torch.bfloat16}, {torch.float32}]
    assert [tensor.tolist() for tensor in own] == [tensor.tolist() for tensor in new]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rule", ["overwrite", "blend", "carry"])
def test_parameters_of_several_types_are_adopted_on_cuda(rule: str) -> None:
    types = [torch.bfloat16, torch.float32, torch.float16]
    own = [torch.zeros(64, 64, dtype=dtype, device="cuda") for dtype in types]
    new = [torch.full((64, 64), place + 1.0, device="cuda") for place in range(3)]
    adopt(own, new, rule, read=[torch.zeros_like(one) for one in new] if rule == "carry" else None)
    assert all(torch.equal(tensor.float(), values) for tensor, values in zip(own, new, strict=True))


def test_no_gradient_is_made_or_lost() -> None:
    own = parameters()
    own[0].grad = torch.ones(2)
    adopt(own, NEW, "carry", read=READ)
    assert own[0].requires_grad and own[0].is_leaf
    assert own[0].grad.tolist() == [1.0, 1.0]
