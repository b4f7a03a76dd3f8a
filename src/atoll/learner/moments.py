"""The inner optimizer's moments of a fragment on their way out of the training process and in, on the model's device.

Bytes and values are those of numerics/moments.py, bit for bit. Which moments there are, kept_moments.py says. A
parameter that the optimizer has not stepped yet has none, and none are put there.

Adoption follows the rule of the fragment, with m̄ the average and n the steps since the copy m_read:

    overwrite   m ← m̄
    blend       m ← αm + (1 − α)m̄
    carry       m ← m + βⁿ(m̄ − m_read), and of a squared one at least βⁿm̄: m_read is what was encoded of it, and may be
                more than it was
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from atoll.learner.codecs import decode, encode
from atoll.learner.kept_moments import KeptMoments, kept_moments
from atoll.learner.model import view_piece
from atoll.learner.offload import EncodedMoments
from atoll.learner.state import Optimizers, optimizers_by_path
from atoll.numerics.codec import Codec, count_values, make_codec
from atoll.numerics.codec_kernels import ABSMAX_BLOCK, HALF_CODE, TINY
from atoll.numerics.fragments import FragmentPlan, Piece, Rows
from atoll.numerics.moments import CODEC, FORMS, NAMES, NONE, Moment, list_moments, moments_nbytes
from atoll.protocol.errors import ConfigError


class OwnMoments(NamedTuple):
    kept: KeptMoments
    tensors: list[torch.Tensor]
    """Of one piece, as they lie in the optimizer's state."""


class InnerMoments:
    def __init__(self, plan: FragmentPlan, parameters: Mapping[str, torch.Tensor], optimizers: Optimizers) -> None:
        """ConfigError: the optimizers keep no moments that can be shared."""
        self._plan, self._parameters, self._codec = plan, parameters, make_codec(CODEC)
        self._groups: dict[int, tuple[Optimizer, int]] = {}
        """By the identity of a parameter, its optimizer and group: loading a state makes groups anew."""
        kept = False
        for optimizer in optimizers_by_path(optimizers).values():
            for number, group in enumerate(optimizer.param_groups):
                found = kept_moments(optimizer, group)
                _check_kept(optimizer, found)
                kept = kept or found is not None
                self._groups.update((id(parameter), (optimizer, number)) for parameter in group["params"])
        if not kept:
            raise ConfigError(
                'share = "moments", but no inner optimizer keeps any: give Learner its optimizer, and SGD a momentum, '
                "or leave share out"
            )

    @torch.no_grad()
    def encode(self, fragment: int) -> EncodedMoments:
        """As they are now."""
        part = self._plan.fragments[fragment]
        own = [self._find(piece) for piece in part.pieces]
        forms = [NONE if one is None else NAMES.index(one.kept.form) for one in own]
        device = self._parameters[part.pieces[0].tensor.name].device
        head = len(part.pieces)
        out = torch.empty(moments_nbytes(self._codec, part, forms) - head, dtype=torch.uint8, device=device)
        for moment in list_moments(self._codec, part, forms):
            found = own[moment.piece]
            assert found is not None
            values = _flatten(found.tensors[moment.slot], device)
            encode_moment(self._codec, moment, values, out[_behind(moment, head)])
        return EncodedMoments(forms, out)

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
        part = self._plan.fragments[fragment]
        before = {} if read is None else self._list_by_place(fragment, read)
        for (number, slot), moment in self._list_by_place(fragment, averaged).items():
            own = self._find(part.pieces[number])
            if own is None or NAMES.index(own.kept.form) != averaged.forms[number]:
                continue
            if read is not None and read.forms[number] != averaged.forms[number]:
                continue
            mine, mean = own.tensors[slot], self._decode(moment, averaged)
            if read is not None:
                left = own.kept.decays[slot] ** steps
                theirs = self._decode(before[number, slot], read)
                mean = _carry(mine, mean, theirs, left, at_least=moment.squared)
            elif rule == "blend":
                mean = _flatten(mine, mean.device) * blend + mean * (1.0 - blend)
            _put(mine, mean, squared=moment.squared)

    def _find(self, piece: Piece) -> OwnMoments | None:
        parameter = self._parameters[piece.tensor.name]
        if id(parameter) not in self._groups:
            return None
        optimizer, number = self._groups[id(parameter)]
        kept, state = kept_moments(optimizer, optimizer.param_groups[number]), optimizer.state.get(parameter, {})
        if kept is None:
            return None
        held = [state.get(key) for key in kept.keys]
        if not all(isinstance(one, torch.Tensor) and one.shape == parameter.shape for one in held):
            return None
        return OwnMoments(kept, [view_piece(one, piece) for one in held])

    def _list_by_place(self, fragment: int, body: EncodedMoments) -> dict[tuple[int, int], Moment]:
        found = list_moments(self._codec, self._plan.fragments[fragment], body.forms)
        return {(moment.piece, moment.slot): moment for moment in found}

    def _decode(self, moment: Moment, body: EncodedMoments) -> torch.Tensor:
        return decode_moment(self._codec, moment, body.data[_behind(moment, len(body.forms))])


def _check_kept(optimizer: Optimizer, kept: KeptMoments | None) -> None:
    """ConfigError: what is registered for it cannot be."""
    if kept is not None and {len(kept.keys), len(kept.decays)} != {len(FORMS.get(kept.form, ()))}:
        raise ConfigError(
            f"what is registered of {type(optimizer).__name__} is no moments: form {kept.form!r} with {len(kept.keys)} "
            f"keys and {len(kept.decays)} decays; forms are {', '.join(NAMES[1:])}"
        )


def _behind(moment: Moment, head: int) -> slice:
    """Where its bytes are behind the forms."""
    return slice(moment.data.start - head, moment.data.stop - head)


def encode_moment(codec: Codec, moment: Moment, values: torch.Tensor, out: torch.Tensor) -> None:
    encode(codec, values.sqrt() if moment.squared else values, moment.rows, out)


def decode_moment(codec: Codec, moment: Moment, data: torch.Tensor) -> torch.Tensor:
    values = torch.empty(count_values(moment.rows), dtype=torch.float32, device=data.device)
    decode(codec, data, moment.rows, values)
    if not moment.squared:
        return values
    roots = torch.maximum(values, _floor_roots(values, moment.rows))
    return torch.where(roots > 0, roots.square().clamp_min(float(TINY)), roots)


def _floor_roots(roots: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Half a code of each value's block."""
    floors, start = [], 0
    for count, width in rows:
        values = roots[start : start + count * width].view(count, width)
        padded = torch.nn.functional.pad(values, (0, -width % ABSMAX_BLOCK)).unflatten(1, (-1, ABSMAX_BLOCK))
        largest = padded.amax(-1, keepdim=True).expand_as(padded).flatten(1)[:, :width]
        floors.append(largest.reshape(-1) * float(HALF_CODE))
        start += count * width
    return torch.cat(floors)


def _carry(mine: torch.Tensor, mean: torch.Tensor, read: torch.Tensor, left: float, *, at_least: bool) -> torch.Tensor:
    carried = _flatten(mine, mean.device) + (mean - read) * left
    return torch.maximum(carried, mean * left) if at_least else carried


def _flatten(mine: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Where the model is: an optimizer may keep its state in host memory."""
    return mine.detach().reshape(-1).to(device, torch.float32)


def _put(mine: torch.Tensor, values: torch.Tensor, *, squared: bool) -> None:
    """In the state's own type; a positive square stays one in it."""
    if squared:
        values = torch.where(values > 0, values.clamp_min(torch.finfo(mine.dtype).tiny), values)
    mine.copy_(values.view(mine.shape))
