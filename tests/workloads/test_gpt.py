"""The GPT: sizes, what it starts from, that it sees no future and that it learns."""

import math

import msgspec
import pytest
import torch

from atoll.workloads.gpt import Gpt, GptConfig
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_learns_a_sentence_and_recites_it(optimizer: str) -> None:
    sentence = b"atolls are rings. "
    model = build_model(SMALL, seed=0)
    optimizers = build_optimizers(model, msgspec.structs.replace(SMALL, optimizer=optimizer))
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
