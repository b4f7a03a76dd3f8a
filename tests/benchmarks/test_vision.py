"""The vision benchmark: its images, its model, and what it leaves in the table."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from vision import BATCH, ROWS, train_together
from vision_learner import build_model, draw_digits, score_model


def test_the_images_of_a_seed_are_the_same_in_every_process() -> None:
    (images, labels), (again, _), (other, _) = (draw_digits(50, seed)[:] for seed in (1, 1, 2))
    assert torch.equal(images, again) and not torch.equal(images, other)
    assert images.shape == (50, 1, 12, 12) and set(labels.tolist()) <= set(range(10))


def test_every_digit_lies_in_its_image() -> None:
    images, labels = draw_digits(400, seed=3)[:]
    inked = [float(images[labels == digit].sum((1, 2, 3)).mean()) for digit in range(10)]
    assert inked[8] > inked[1] > inked[7], "an eight has the most ink, a seven the least"


def test_data_parallel_learns_to_read() -> None:
    untrained, _ = score_model(build_model(0))
    trained = train_together(ROWS["dp"], seed=0, steps=40)
    assert trained["loss"] < untrained - 0.3 and trained["errors"] < 0.8
    assert ROWS["dp"].learners * BATCH == 128
