"""GPT-2 from transformers with a DataLoader of its own: workers, and the samples that the run leases to each learner.

atoll train examples/gpt2.py --learners 2 --steps 200 --out atoll-runs/gpt2
atoll export atoll-runs/gpt2 gpt2.safetensors
python examples/gpt2.py gpt2.safetensors             # the validation loss of what was exported
"""

import argparse
import inspect
import sys

import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import atoll

text = torch.tensor(list(inspect.getsource(argparse).encode()))


class Windows(Dataset):
    """A window of the text at every sixteenth byte; GPT-2 shifts the labels itself."""

    def __init__(self, text: torch.Tensor) -> None:
        self.windows = text.unfold(0, 64, 16)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


train, held_out = Windows(text[:-5000]), Windows(text[-5000:]).windows
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2))


@torch.no_grad()
def score(model: GPT2LMHeadModel) -> float:
    return model.eval()(input_ids=held_out, labels=held_out).loss.item()


if len(sys.argv) > 1:
    model.load_state_dict(load_file(sys.argv[1]), strict=False)  # lm_head is tied to wte, and saved once
    print(f"validation loss {score(model):.6f}")
    sys.exit()

atoll.evaluate(model, score)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with atoll.Learner(model.train(), optimizer) as learner:
    for batch in DataLoader(train, batch_sampler=learner.sampler(train, batch_size=8), num_workers=1):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=batch["input_ids"].numel(), loss=loss)
        if learner.done:  # otherwise the batches that are loaded already come first
            break
