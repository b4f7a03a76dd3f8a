"""JAX: a learner whose model is a pytree of arrays, and whose optimizer is optax's.

    from atoll.integrations.jax import Learner

    with Learner(params, opt_state) as learner:
        params, opt_state = learner.params, learner.opt_state     # the run's
        for batch in learner.batches(dataset, batch_size=8):
            params, opt_state, loss = train_step(params, opt_state, batch)     # jitted, may donate
            params, opt_state = learner.step(params, opt_state, tokens=batch.size, loss=loss)
    params = learner.params                                       # the final model

Or the learner keeps both trees and makes the steps: `Learner(params, optimizer)`, then `learner.update(gradients, ...)`
with gradients at `learner.params`.

What a learner of torch's and one of JAX's call by the same name, shape and type, they train together (docs/jax.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from atoll.extras import explained

with explained(__name__, "jax"):
    import jax
    import optax
    import torch

    from atoll.integrations.jax_arrays import Chosen, JaxModel
    from atoll.learner.data import Datasets
    from atoll.learner.evaluate import score_run
    from atoll.learner.learner import JOIN_WAIT_S, BaseLearner, refuse_evaluator
    from atoll.learner.script import end_script, explain_keywords
    from atoll.learner.unmerged import FrozenRule, digest_tensors
    from atoll.numerics.fragments import difference
    from atoll.protocol.errors import ConfigError, PlanError
    from atoll.protocol.limits import Direction
    from atoll.protocol.messages import TensorSpec

__all__ = ["AS_TORCH", "Learner", "evaluate", "load"]

AS_TORCH: Mapping[str, Any] = {
    "names": lambda path: path.replace("kernel", "weight"),
    "transposed": lambda name: name.endswith("weight"),
}
"""For `Learner`, `evaluate` and `load`, of dense layers: the run calls and keeps each tensor as torch's Linear does,
`weight`, with a row for each output."""


class Learner(BaseLearner):
    """Joins the run it was launched in; alone, without a syncer, it only counts.

    `params` is the pytree that is trained: every leaf an array of float32, bfloat16 or float16, all on one device.
    `opt_state` is what the optimizer keeps: saved with snapshots, and taken from a peer by a newcomer. On entering,
    both are committed to their device and `params` replaced by the run's: go on with `learner.params` and
    `learner.opt_state`. An optax optimizer in its place begins with its `init(params)`; `update` makes its steps.
    `names` gives a tensor's name in the run for its path, 'layers.0.kernel', which is its name otherwise. `transposed`
    says of which tensors the run has the transposed matrix, as torch's Linear has its weights; `embeddings` which are
    embeddings (otherwise those called 'embedding'): both by names in the run, as a collection or a function.
    All else is as in `atoll.Learner`.
    """

    @explain_keywords
    def __init__(
        self,
        params: Any,
        opt_state: Any = None,
        *,
        names: Callable[[str], str] | None = None,
        transposed: Chosen = (),
        embeddings: Chosen | None = None,
        syncer: str | None = None,
        name: str | None = None,
        seed: int | None = None,
        data: str = "",
        tokens_per_step: int = 0,
        frozen: FrozenRule = "run",
        join_wait_s: float = JOIN_WAIT_S,
    ) -> None:
        refuse_evaluator()
        self._optimizer = opt_state if isinstance(opt_state, optax.GradientTransformation) else None
        if self._optimizer is not None:
            opt_state = self._optimizer.init(params)
            self._apply = jax.jit(self._apply_gradients, donate_argnums=1)
        self._arrays = _make_model(params, opt_state, names, transposed, embeddings)
        self._losses = JaxLosses()
        super().__init__(
            self._arrays,
            syncer=syncer,
            name=name,
            seed=seed,
            data=data,
            tokens_per_step=tokens_per_step,
            frozen=frozen,
            join_wait_s=join_wait_s,
        )

    def __enter__(self) -> Self:
        super().__enter__()
        self._arrays.hand_over()
        return self

    @property
    def params(self) -> Any:
        """The parameters as the last call left them: the run's after entering, the final model after leaving."""
        return self._arrays.look()[0]

    @property
    def opt_state(self) -> Any:
        return self._arrays.look()[1]

    @explain_keywords
    def step(self, params: Any, opt_state: Any = None, *, tokens: int, loss: Any = None) -> tuple[Any, Any]:
        """Call after every step with what it returned and the tokens (or samples) it trained on; go on with what this
        returns: the parameters may hold what others trained. What was given may be donated from then on."""
        try:
            self._arrays.take_arrays(params, opt_state)
        except ConfigError as error:
            if not self.alone:  # the end of 'with' says it, to the run too
                raise
            end_script(str(error), error.exit_code, error)
        self._step(tokens, self._losses.read(loss))
        return self._arrays.hand_over()

    def update(self, gradients: Any, *, tokens: int, loss: Any = None) -> None:
        """Let the optimizer that this learner was given make a step, by gradients at `learner.params`, which are others
        then."""
        if self._optimizer is None:
            raise TypeError("learner.update makes the steps of an optax optimizer: Learner(params, optimizer)")
        params, opt_state = self._arrays.hand_over()
        self.step(*self._apply(gradients, opt_state, params), tokens=tokens, loss=loss)

    def _apply_gradients(self, gradients: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        assert self._optimizer is not None
        updates, opt_state = self._optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def batches(
        self,
        dataset: Datasets | Iterable[Any],
        batch_size: int | None = None,
        *,
        weights: Mapping[str, float] | None = None,
        epochs: int = 0,
        **loader: Any,
    ) -> Iterator[Any]:
        """As `atoll.Learner.batches`; batches are of numpy's arrays."""
        given = super().batches(dataset, batch_size, weights=weights, epochs=epochs, **loader)
        return (_as_numpy(batch) for batch in given)


class JaxLosses:
    """The newest loss that is known without waiting for the device: that of a step or two ago."""

    def __init__(self) -> None:
        self._pending: Any = None

    def read(self, loss: Any) -> float | None:
        if not isinstance(loss, jax.Array):
            return None if loss is None else float(loss)
        known = None
        if self._pending is not None and self._pending.is_ready():
            known, self._pending = float(self._pending), None
        if self._pending is None:
            self._pending = loss
        return known


def _make_model(*given: Any) -> JaxModel:
    try:
        return JaxModel(*given)
    except (ConfigError, PlanError) as error:
        end_script(str(error), error.exit_code, error)


def _as_numpy(batch: Any) -> Any:
    """As the script's dataset nests it; torch's tensors in the same memory."""
    if isinstance(batch, torch.Tensor):
        return batch.numpy()
    if isinstance(batch, Mapping):
        return {key: _as_numpy(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return tuple(_as_numpy(value) for value in batch)
    return batch


# ---- scoring --------------------------------------------------------------------------------------------------------


class ScoredArrays:
    """The global model as a pytree, for the evaluator."""

    def __init__(self, model: JaxModel) -> None:
        self._model = model

    def fit_run(self, tensors: Sequence[TensorSpec], frozen: str) -> Mapping[str, torch.Tensor]:
        if (reason := difference(self._model.describe(), tensors)) is not None:
            raise PlanError(reason)
        nothing = digest_tensors({})
        if frozen and frozen.partition("-")[0] != nothing:
            raise PlanError("the run's model has frozen parameters, which a JAX script cannot score")
        return self._model.tensors()

    def hand_over(self) -> Any:
        self._model.note_adopted(self._model.tensors())
        return self._model.look()[0]


@explain_keywords
def evaluate(
    params: Any,
    score: Callable[[Any], float | Mapping[str, float]],
    *,
    names: Callable[[str], str] | None = None,
    transposed: Chosen = (),
    embeddings: Chosen | None = None,
    sample: Callable[[Any], str] | None = None,
    directions: Mapping[str, Direction] | None = None,
    unit: str = "",
    ema: float = 0.0,
) -> None:
    """Score the global model until the run ends: `score(params)` is a loss, or figures by name. As `atoll.evaluate`: in
    a learner, and alone, it returns at once."""
    model = _make_model(params, None, names, transposed, embeddings)
    score_run(ScoredArrays(model), score, sample=sample, directions=directions, unit=unit, ema=ema)


def load(params: Any, path: str | Path, *, names: Callable[[str], str] | None = None, transposed: Chosen = ()) -> Any:
    """`params` with the values of an exported model (`atoll export`). ConfigError: it is another one's."""
    model = JaxModel(params, None, names, transposed)
    model.load_weights(Path(path))
    return model.look()[0]
