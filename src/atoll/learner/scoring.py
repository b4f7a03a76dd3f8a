"""The evaluator: fetches the global model from the syncer, scores it, reports the figure, until the run is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from atoll.fabric.client import get_fragment_once, get_json, post_score
from atoll.fabric.wire import SAMPLE_CHARS, Score
from atoll.learner.model import BufferRule, describe, merged
from atoll.learner.unmerged import digest_unmerged
from atoll.numerics.fragments import Plan, difference, elements
from atoll.protocol.bounds import near
from atoll.protocol.errors import PeerError, PlanError, Unreachable
from atoll.telemetry.status import RunStatus

POLL_S = 0.25
GIVE_UP_S = 60.0
"""How long a syncer may be out of reach before the evaluator gives up."""
FETCH_S = 120.0


class Evaluator:
    def __init__(
        self, url: str, model: nn.Module, score: Callable[[Any], float], sample: Callable[[Any], str] | None
    ) -> None:
        self._url, self._model, self._score, self._sample = url, model, score, sample
        self._parameters: dict[str, torch.Tensor] = {}
        self._checked = False
        self._cpu_s = 0.0

    async def run(self) -> None:
        due, run, heard_at = 0, "", time.monotonic()
        while True:
            try:
                status = msgspec.convert(await get_json(self._url, "/v1/status"), RunStatus)
            except (PeerError, Unreachable):
                if time.monotonic() - heard_at > GIVE_UP_S:
                    raise
                await asyncio.sleep(POLL_S)
                continue
            heard_at = time.monotonic()
            if status.run != run:
                due, run = 0, status.run
            final = status.phase == "finished"
            if status.phase != "waiting" and (final or status.round >= due):
                every = await self._once(status.round, final)
                due = (status.round // every + 1) * every
            if final:
                return
            await asyncio.sleep(POLL_S)

    async def _once(self, round: int, final: bool) -> int:
        """Score the model as it is now; how many rounds lie between two scores."""
        manifest: Any = await get_json(self._url, "/v1/manifest")
        plan = msgspec.convert(manifest["plan"], Plan)
        if not self._checked:
            self._check(plan, str(manifest.get("frozen", "")))
        await self._fetch(plan)
        loss = near(float(self._score(self._model)))
        text = self._sample(self._model)[:SAMPLE_CHARS] if final and self._sample is not None else ""
        spent = time.process_time() - self._cpu_s
        self._cpu_s += spent
        await post_score(
            self._url, Score(round=round, loss=loss, cpu_s=float(f"{spent:.3f}"), sample=text, final=final)
        )
        return max(1, int(manifest["evaluate_every"]))

    def _check(self, plan: Plan, frozen: str) -> None:
        run = tuple(tensor for part in plan.fragments for tensor in part.tensors)
        rules: tuple[BufferRule, ...] = (None, "local", "mean", "first")  # which one, the learners' script says
        rule = next((one for one in rules if difference(describe(self._model, one), run) is None), None)
        if (reason := difference(describe(self._model, rule), run)) is not None:
            raise PlanError(reason)
        if frozen and digest_unmerged(self._model, rule) != frozen:
            raise PlanError(
                "the evaluator's frozen parameters or buffers are not those of the run's first learner: "
                "load them from the same file, or draw them after the same torch.manual_seed"
            )
        self._parameters = merged(self._model, rule)
        self._checked = True

    async def _fetch(self, plan: Plan) -> None:
        for part in plan.fragments:
            values = np.empty(part.size, dtype=np.float32)
            await get_fragment_once(self._url, part.index, values.view(np.uint8).data, FETCH_S)
            for tensor, start in zip(part.tensors, part.offsets, strict=True):
                flat = torch.from_numpy(values[start : start + elements(tensor)])
                self._parameters[tensor.name].data.copy_(flat.view(tensor.shape))
