"""The exponential moving average (EMA) of the global models that an evaluator fetches, and the file that holds it.

    Θ̄ ← Θ̄ + (1 − d)(Θ − Θ̄),  d = min(decay, n / (n + 1)) with n models in it: a plain mean until the decay is less

Rules kept here, each with its test:
- A model with a fragment of version 0, which nobody trained, is left out, and so is one whose score is not finite.
- The same model is taken once: an evaluator that died before it sent a score fetches the same versions again.
- After a rollback the average begins anew, since it holds values that the run has given up.
- Averaged running statistics (BatchNorm) enter with the same share as the parameters: activations of averaged weights
  are not distributed like those of the newest model. Buffers that a run takes from one learner ("first") are those of
  the newest model, since they may be values that have no mean. numerics/version_mean.py does the same.
- The file is replaced whole, and before the score is sent. It names run, versions, decay and number of models, so the
  next evaluator of the run goes on with the same bits. With another decay it begins anew.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from operator import lt
from pathlib import Path

import numpy as np
import safetensors.numpy

from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import FragmentPlan
from atoll.protocol.errors import AtollError
from atoll.store.rundir import facts_of_model, read_model_facts, save_model


class AveragedModel:
    def __init__(self, decay: float, path: Path | None = None) -> None:
        self._decay, self.path = decay, path
        """`path`: the file that it is kept in; None: it lasts as long as this process."""
        self._run = ""
        self._versions: tuple[int, ...] = ()
        """Of the newest model in it."""
        self._complained = False
        self.models = 0
        """Number of models in it."""
        self.tensors: dict[str, FloatArray] = {}

    def add(
        self,
        run: str,
        plan: FragmentPlan,
        versions: Sequence[int],
        tensors: Mapping[str, FloatArray],
        least: Sequence[int] = (),
    ) -> None:
        """`least`: per fragment, the version that the run was last rolled back with."""
        if run != self._run:
            self._begin(run)
        if any(map(lt, self._versions, least)):
            self.models = 0
        if 0 in versions or (self.models and tuple(versions) == self._versions):
            return
        share = np.float32(1.0 - min(self._decay, self.models / (self.models + 1)))
        taken_over = {spec.name_in_model for spec in plan.tensors if spec.buffer_rule == "first"}
        for name, tensor in tensors.items():
            if self.models and name not in taken_over:
                self.tensors[name] += share * (tensor - self.tensors[name])
            else:
                self.tensors[name] = np.array(tensor)
        self.models, self._versions = self.models + 1, tuple(versions)

    def save(self, round: int) -> None:
        """Replace the file. A disk that fails costs the file, not the scores."""
        if self.path is None or not self.models:
            return
        facts = facts_of_model(self._run, round, self._versions)
        facts |= {"decay": repr(self._decay), "models": str(self.models)}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_model(self.path, self.tensors, facts)
        except (OSError, AtollError) as error:
            if not self._complained:
                print(f"atoll: the average is not kept: {error}", file=sys.stderr, flush=True)
            self._complained = True

    def _begin(self, run: str) -> None:
        """With what an earlier evaluator of the run left, if it has the same decay; otherwise anew."""
        self._run, self._versions, self.models, self.tensors = run, (), 0, {}
        facts = read_model_facts(self.path) if self.path is not None else {}
        if self.path is None or facts.get("run") != run:
            return
        if facts.get("decay") != repr(self._decay):
            print(f"atoll: the average begins anew: its decay was {facts.get('decay')}", file=sys.stderr, flush=True)
            return
        self.tensors = safetensors.numpy.load_file(self.path)
        self._versions = tuple(map(int, facts["versions"].split(",")))
        self.models = int(facts["models"])
