"""Atoll trains one model on many unreliable machines: Decoupled DiLoCo on PyTorch.

    import atoll
    with atoll.Learner(model, optimizer) as learner:      # help(atoll.Learner)
        ...
            learner.step(tokens=batch.numel(), loss=loss)
    learner = atoll.attach(model, optimizer, tokens=4096)  # help(atoll.attach): your loop stays as it is
    atoll.evaluate(model, score)                          # help(atoll.evaluate): a scorer of your own
    atoll.kept_moments.register(...)                      # an optimizer of your own for --share moments

On the command line: `atoll --help`, or `python -m atoll --help`.

The names are resolved when they are first used, so that a syncer or a courier starts without torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # that of `typing`, which takes 30 ms: a join link is on the command line so long (entry.py)
if TYPE_CHECKING:
    from atoll.learner.attach import attach
    from atoll.learner.evaluate import evaluate
    from atoll.learner.kept_moments import KeptMoments, kept_moments
    from atoll.learner.learner import Learner

__all__ = ["KeptMoments", "Learner", "__version__", "attach", "evaluate", "kept_moments"]
__version__ = "0.1.0.dev0"


def __dir__() -> list[str]:
    """What a user may use; the rest of the package is for itself."""
    return sorted(__all__)


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    from atoll.extras import explained

    with explained(f"atoll.{name}"):
        return _resolve(name)


def _resolve(name: str) -> object:
    if name == "Learner":
        from atoll.learner.learner import Learner

        return Learner
    if name == "attach":
        from atoll.learner.attach import attach

        return attach
    if name == "evaluate":
        from atoll.learner.evaluate import evaluate

        return evaluate
    from atoll.learner import kept_moments

    return getattr(kept_moments, name)
