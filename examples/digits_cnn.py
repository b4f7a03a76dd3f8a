"""A CNN with BatchNorm that reads digits: its running statistics are averaged over the learners.

Alone it just trains:           python examples/digits_cnn.py
Two learners train one model:   atoll train examples/digits_cnn.py --learners 2 --steps 200
The whole model, to load:       atoll export RUN digits.safetensors
"""

import torch
from torch import nn

import atoll

ROWS = ["75557", "26227", "71747", "71717", "55711", "74717", "74757", "71111", "75757", "75717"]
"""Of each digit, five rows of three pixels, as bits."""


def draw_digits(count: int) -> torch.utils.data.TensorDataset:
    """Images of 12 × 12 with a digit somewhere in them, under noise; and which digit it is."""
    glyphs = torch.tensor([[[int(row) >> bit & 1 for bit in (2, 1, 0)] for row in rows] for rows in ROWS]).float()
    glyphs = glyphs.repeat_interleave(2, 1).repeat_interleave(2, 2)
    labels, images = torch.randint(10, (count,)), 0.7 * torch.randn(count, 1, 12, 12)
    places = torch.stack([torch.randint(3, (count,)), torch.randint(7, (count,))], 1).tolist()
    for image, label, (down, right) in zip(images, labels, places, strict=True):
        image[0, down : down + 10, right : right + 6] += glyphs[label]
    return torch.utils.data.TensorDataset(images, labels)


torch.manual_seed(0)
dataset, held_out = draw_digits(8000), draw_digits(1000)
layers: list[nn.Module] = []
for inside, outside in ((1, 16), (16, 32)):
    layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2)]
model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 3 * 3, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


@torch.no_grad()
def score(model: nn.Module) -> float:
    model.eval()  # the running statistics, not those of this batch
    images, labels = held_out[:]
    return nn.functional.cross_entropy(model(images), labels).item()


atoll.evaluate(model, score)

with atoll.Learner(model, optimizer) as learner:  # buffers="local" or "first": another rule for the statistics
    for images, labels in learner.batches(dataset, batch_size=32):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=len(images), loss=loss)

if learner.alone:
    print(f"held-out loss {score(model):.3f}")
