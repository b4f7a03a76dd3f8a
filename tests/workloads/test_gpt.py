"""The GPT: sizes, what it starts from, that it sees no future and that it learns."""

import math

import msgspec
import pytest
import torch

from atoll.workloads.gpt import BALANCE, Experts, Gpt, GptConfig
from atoll.workloads.settings import OPTIMIZERS, WorkloadSettings
from atoll.workloads.training import build_model, build_optimizers

SMALL = WorkloadSettings(depth=1, block=16, lr=1e-2)


def test_depth_is_the_one_dial() -> None:
    config = GptConfig(depth=4, block=32)
    model = Gpt(config)
    assert (config.width, config.heads, len(model.blocks)) == (128, 4, 4)
    assert len(list(model.parameters())) >= 24
    assert model.logits(torch.zeros(2, 32, dtype=torch.long)).shape == (2, 32, 256)


def test_an_untrained_model_knows_nothing() -> None:
    model = build_model(SMALL, seed=0)
    loss = model(torch.randint(256, (8, 17), generator=torch.Generator().manual_seed(1)))
    assert loss.shape == ()
    assert float(loss.detach()) == pytest.approx(math.log(256), abs=0.2)


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_one_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (build_model(SMALL, seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_it_does_not_see_the_future() -> None:
    model = build_model(SMALL, seed=0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    x = torch.arange(16)[None]
    changed = x.clone()
    changed[0, 10:] = 200
    assert torch.allclose(model.logits(x)[:, :10], model.logits(changed)[:, :10])
    assert not torch.allclose(model.logits(x)[:, 10:], model.logits(changed)[:, 10:])


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_learns_a_sentence_and_recites_it(optimizer: str, experts: int) -> None:
    sentence = b"atolls are rings. "
    settings = msgspec.structs.replace(SMALL, optimizer=optimizer, experts=experts)
    model = build_model(settings, seed=0)
    optimizers = build_optimizers(model, settings)
    batch = torch.tensor([list((sentence * 2)[i : i + 17]) for i in range(len(sentence))])
    losses = []
    for _ in range(120):
        loss = model(batch)
        loss.backward()
        for one in optimizers.values():
            one.step()
            one.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 < 5 < losses[0]
    assert model.generate(b"atolls are ", 6, temperature=0) == b"rings."


def test_writing_is_decided_by_the_generator() -> None:
    model = build_model(SMALL, seed=0)
    once, again = (model.generate(b"", 24, 1.0, torch.Generator().manual_seed(5)) for _ in range(2))
    assert once == again
    assert len(once) == 24


def test_a_byte_goes_through_two_experts_weighed_by_the_router() -> None:
    experts = Experts(width=8, count=3)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 5, 8)
    written, _ = experts(x)
    for row, out in zip(x.reshape(-1, 8), written.reshape(-1, 8), strict=True):
        chances = torch.softmax(experts.router(row), 0)
        first, second = chances.topk(2).indices.tolist()
        each = {e: experts.down[e](torch.relu(experts.up[e](row)) ** 2) * chances[e] for e in (first, second)}
        assert torch.allclose(out, (each[first] + each[second]) / (chances[first] + chances[second]), atol=1e-4)


def test_spread_evenly_over_experts_is_one_and_all_to_the_same_two_is_half_their_number() -> None:
    experts, x = Experts(width=4, count=4), torch.eye(4)[None]
    experts.router.weight.data = 50.0 * (torch.eye(4) + torch.eye(4).roll(1, 0))
    assert float(experts(x)[1].detach()) == pytest.approx(1.0)
    experts.router.weight.data = torch.tensor([[50.0] * 4, [50.0] * 4, [0.0] * 4, [0.0] * 4])
    assert float(experts(x)[1].detach()) == pytest.approx(2.0)


def test_the_balance_of_experts_is_trained_and_not_scored() -> None:
    model = build_model(msgspec.structs.replace(SMALL, experts=4), seed=0)
    batch = torch.randint(256, (4, 17))
    trained, scored = float(model(batch).detach()), float(model.eval()(batch).detach())
    assert BALANCE * 0.9 < trained - scored < BALANCE * 2.1
