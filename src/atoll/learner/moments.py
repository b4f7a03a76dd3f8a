"""The inner optimizer's moments of a fragment on their way out of the training process and in, on the model's device.

Training waits meanwhile, so all moments of a fragment are worked on at once (moment_blocks.py). Which there are,
kept_moments.py says. A parameter that the optimizer has not stepped yet has none, and none are put there.

Adoption follows the rule of the fragment, with m̄ the average and n the steps since the copy m_read:

    overwrite   m ← m̄
    blend       m ← αm + (1 − α)m̄
    carry       m ← m + βⁿ(m̄ − m_read), and of a squared one at least βⁿm̄: m_read is what was encoded of it, and may be
                more than it was
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from atoll.learner.kept_moments import KeptMoments, kept_moments
from atoll.learner.model import view_piece
from atoll.learner.moment_blocks import Run, count_bytes, lay_out
from atoll.learner.offload import EncodedMoments
from atoll.learner.state import Optimizers, optimizers_by_path
from atoll.numerics.fragments import FragmentPlan, Piece
from atoll.numerics.moments import FORMS, NAMES, NONE
from atoll.protocol.errors import ConfigError

LAYOUTS = 4
"""Kept for each fragment. Forms change with the first step of an optimizer, and differ where those of learners do."""


class OwnMoments(NamedTuple):
    kept: KeptMoments
    tensors: list[torch.Tensor]
    """Of one piece, as they lie in the optimizer's state."""


class InnerMoments:
    def __init__(self, plan: FragmentPlan, parameters: Mapping[str, torch.Tensor], optimizers: Optimizers) -> None:
        """ConfigError: the optimizers keep no moments that can be shared."""
        self._plan, self._parameters = plan, parameters
        self._device = next(iter(parameters.values())).device
        self._groups: list[tuple[Optimizer, int]] = []
        """Each optimizer with the numbers of its groups: loading a state makes groups anew."""
        self._group_of: dict[int, int] = {}
        """By the identity of a parameter, its place among them."""
        kept = False
        for optimizer in optimizers_by_path(optimizers).values():
            for number, group in enumerate(optimizer.param_groups):
                found = kept_moments(optimizer, group)
                _check_kept(optimizer, found)
                kept = kept or found is not None
                self._group_of.update((id(parameter), len(self._groups)) for parameter in group["params"])
                self._groups.append((optimizer, number))
        self._lay_out = lru_cache(maxsize=LAYOUTS * len(plan.fragments))(self._make_layout)
        if not kept:
            raise ConfigError(
                'share = "moments", but no inner optimizer keeps any: give Learner its optimizer, and SGD a momentum, '
                "or leave share out"
            )

    @torch.no_grad()
    def encode(self, fragment: int) -> EncodedMoments:
        """As they are now."""
        own = self._find_own(fragment)
        forms = _name_forms(own)
        runs = self._lay_out(fragment, forms, forms)
        out = torch.empty(count_bytes(runs), dtype=torch.uint8, device=self._device)
        for run in runs:
            run.encode(run.gather(_choose(own, run)), out)
        return EncodedMoments(list(forms), out)

    @torch.no_grad()
    def adopt(
        self,
        fragment: int,
        averaged: EncodedMoments,
        rule: str,
        *,
        blend: float = 0.0,
        read: EncodedMoments | None = None,
        steps: int = 0,
    ) -> None:
        """`read`: with carry, the own ones as they were encoded with the copy that was merged; `steps`: made since."""
        assert (rule == "carry") == (read is not None), "carry is given what was read"
        own = self._find_own(fragment)
        bodies = [averaged] if read is None else [averaged, read]
        each = zip(_name_forms(own), *(body.forms for body in bodies), strict=True)
        taken = tuple(same[0] if len(set(same)) == 1 else NONE for same in each)
        layouts = [self._lay_out(fragment, tuple(body.forms), taken) for body in bodies]
        for runs in zip(*layouts, strict=True):
            run, mine = runs[0], _choose(own, runs[0])
            mean, *before = (of.decode(body.data) for of, body in zip(runs, bodies, strict=True))
            if before:
                mean = _carry(run, run.gather(mine), mean, before[0], _find_left(own, run, steps))
            elif rule == "blend":
                mean = run.gather(mine) * blend + mean * (1.0 - blend)
            run.put(mine, mean)

    def _make_layout(self, fragment: int, forms: tuple[int, ...], taken: tuple[int, ...]) -> list[Run]:
        return lay_out(self._plan.fragments[fragment], forms, taken, self._device)

    def _find_own(self, fragment: int) -> list[OwnMoments | None]:
        """By piece."""
        kept = cache(self._find_kept)
        return [self._find(piece, kept) for piece in self._plan.fragments[fragment].pieces]

    def _find_kept(self, place: int) -> KeptMoments | None:
        optimizer, number = self._groups[place]
        return kept_moments(optimizer, optimizer.param_groups[number])

    def _find(self, piece: Piece, kept_by: Callable[[int], KeptMoments | None]) -> OwnMoments | None:
        """`kept_by`: what `_find_kept` says now."""
        parameter = self._parameters[piece.tensor.name]
        place = self._group_of.get(id(parameter))
        if place is None or (kept := kept_by(place)) is None:
            return None
        state = self._groups[place][0].state.get(parameter, {})
        held = [state.get(key) for key in kept.keys]
        if not all(isinstance(one, torch.Tensor) and one.shape == parameter.shape for one in held):
            return None
        return OwnMoments(kept, [view_piece(one, piece) for one in held])


def _check_kept(optimizer: Optimizer, kept: KeptMoments | None) -> None:
    """ConfigError: what is registered for it cannot be."""
    if kept is not None and {len(kept.keys), len(kept.decays)} != {len(FORMS.get(kept.form, ()))}:
        raise ConfigError(
            f"what is registered of {type(optimizer).__name__} is no moments: form {kept.form!r} with {len(kept.keys)} "
            f"keys and {len(kept.decays)} decays; forms are {', '.join(NAMES[1:])}"
        )


def _name_forms(own: Sequence[OwnMoments | None]) -> tuple[int, ...]:
    return tuple(NONE if one is None else NAMES.index(one.kept.form) for one in own)


def _choose(own: Sequence[OwnMoments | None], run: Run) -> list[torch.Tensor]:
    """Those of the run."""
    return [found.tensors[moment.slot] for moment in run.moments if (found := own[moment.piece]) is not None]


def _find_left(own: Sequence[OwnMoments | None], run: Run, steps: int) -> list[float]:
    """What these steps leave of each moment of the run: βⁿ."""
    return [
        found.kept.decays[moment.slot] ** steps for moment in run.moments if (found := own[moment.piece]) is not None
    ]


def _carry(run: Run, mine: torch.Tensor, mean: torch.Tensor, read: torch.Tensor, left: Sequence[float]) -> torch.Tensor:
    """`mean` is overwritten."""
    change = mean - read
    torch._foreach_mul_([*run.split(change), *run.split(mean)], [*left, *left])
    carried = mine + change
    return torch.where(run.squared, torch.maximum(carried, mean), carried)
