"""How far a learner is, below a cell; with a real kernel in tests/integrations/test_notebook.py."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import atoll
from atoll.learner import notebook


class Shown:
    """What a kernel is asked to show."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, bool]] = []
        self.told = threading.Event()

    def publish(self, *, data: dict[str, Any], transient: dict[str, str], update: bool) -> None:
        self.lines.append((transient["display_id"], data["text/plain"], update))
        if "has left" in data["text/plain"]:
            self.told.set()


def make_shell(monkeypatch: pytest.MonkeyPatch, **shell: Any) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(**shell)))


def train(steps: int) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.Learner(model, optimizer) as learner:
        for _ in range(steps):
            learner.step(tokens=1)


def test_a_kernel_shows_one_line_that_is_written_anew_until_the_learner_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("ATOLL_SYNCER", "ATOLL_JOIN", "ATOLL_LEARNER", "ATOLL_ROLE"):
        monkeypatch.delenv(name, raising=False)
    shown = Shown()
    make_shell(monkeypatch, kernel=object(), display_pub=shown)
    train(3)
    assert shown.told.wait(30)
    (line, first, again), *_, (same, last, anew) = shown.lines
    assert (again, anew) == (False, True) and line == same
    assert first == "learner-0: training, 0 steps, 0% of the run"
    assert last == "learner-0: has left, 3 steps, 0% of the run"


def test_a_terminal_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown()
    make_shell(monkeypatch, display_pub=shown)
    end = notebook.show_progress(lambda: "here")
    monkeypatch.delitem(sys.modules, "IPython")
    notebook.show_progress(lambda: "here")()
    end()
    assert not shown.lines
