"""The loss a script hands in, read without making the device wait."""

from __future__ import annotations

import torch


class Losses:
    """Keeps the newest loss whose value is known. On CUDA that is a step or two old."""

    def __init__(self) -> None:
        self._known: float | None = None
        self._pending: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def add(self, loss: torch.Tensor | float | None) -> None:
        if loss is None:
            return
        if not isinstance(loss, torch.Tensor):
            self._known = float(loss)
        elif loss.is_cpu:
            self._known = loss.item()
        elif self._pending is None or self._pending[1].query():
            self._settle()
            host = loss.detach().float().to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(loss.device))
            self._pending = (host, event)

    def latest(self) -> float | None:
        if self._pending is not None and self._pending[1].query():
            self._settle()
        return self._known

    def _settle(self) -> None:
        if self._pending is not None:
            self._known = float(self._pending[0])
            self._pending = None
