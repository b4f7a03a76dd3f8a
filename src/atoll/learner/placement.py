"""The placement of a learner's base and feedback, which decides whether its courier or its device encodes.

    host      in the memory that it shares with its courier, which encodes; the device holds a few staging buffers
    device    on the model's device, which encodes (device_offload.py); only bodies leave it

`auto` takes device on a GPU for codecs with feedback, which are dear to encode, where it fits into a quarter of what is
free when the run's settings are known: activations, and often the inner optimizer's state, are still to come. It takes
host elsewhere: with fp32 and bf16 there is little to encode, and host was measured to be as fast, without the memory. A
replay has host, because it encodes itself; share = "moments" and learners of several ranks, which send parts of
fragments, are built for host alone.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from atoll.learner.codecs import scratch_bytes
from atoll.learner.offload import READ_STAGES
from atoll.mailbox.box import BoxLayout, available_bytes
from atoll.numerics.codec import largest_body, make_codec
from atoll.numerics.fragments import FragmentPlan
from atoll.protocol.errors import ConfigError
from atoll.protocol.settings import Settings

PlacementWish = Literal["auto", "host", "device"]
WISHES: tuple[PlacementWish, ...] = ("auto", "host", "device")
SHARE = 4
"""Unasked, a learner takes at most one part in SHARE of the free memory."""


class Placement(NamedTuple):
    on_device: bool
    text: str
    """Reason for the choice, and the memory it takes. Empty: there was nothing to choose."""


def choose_placement(
    wish: PlacementWish,
    device: torch.device,
    plan: FragmentPlan,
    settings: Settings,
    free: int | None,
    *,
    replays: bool = False,
    ranks: bool = False,
) -> Placement:
    """Return the placement of a learner. `free`: bytes of the device, if known. ConfigError: the wish cannot be met."""
    need = device_bytes(plan, settings)
    figures = f"{_mib(need)} of {device}" + ("" if free is None else f", where {_mib(free)} are free")
    if replays or (wish == "auto" and device.type != "cuda"):
        return Placement(False, "")
    if settings.shares_moments:
        if wish == "device":
            raise ConfigError("placement = device does not send moments: use placement = host, or leave share out")
        on_device, reason = False, 'share = "moments" is built for it'
    elif ranks:
        if wish == "device":
            raise ConfigError("placement = device encodes whole fragments: a learner of several ranks has host")
        on_device, reason = False, "a rank sends parts of fragments"
    elif wish != "auto":
        on_device, reason = wish == "device", "as asked"
    elif not make_codec(settings.codec).needs_feedback:
        on_device, reason = False, f"contributions in {settings.codec} are cheap to encode"
    else:
        on_device = is_affordable(need, free)
        reason = f"device takes {figures}: {'at most' if on_device else 'more than'} a quarter"
    if on_device and free is not None and need > free:
        raise ConfigError(f"placement = device takes {figures}: use placement = host")
    return Placement(on_device, _describe(on_device, reason, device, plan, need))


def _describe(on_device: bool, reason: str, device: torch.device, plan: FragmentPlan, need: int) -> str:
    if on_device:
        return f"placement device ({reason}): base, feedback and copies take {_mib(need)} of {device}, which encodes"
    staging = f"; staging takes up to {_mib(staging_bytes(plan))} of {device}" if device.type == "cuda" else ""
    return f"placement host ({reason}): base and feedback are in shared memory, the courier encodes{staging}"


def staging_bytes(plan: FragmentPlan) -> int:
    """Return the bytes of staging in both placements: for copies on their way out and a version on its way in."""
    return (READ_STAGES + 1) * 4 * plan.largest


def device_bytes(plan: FragmentPlan, settings: Settings) -> int:
    """Return the bytes that placement device takes of the device."""
    codec, layout = make_codec(settings.codec), BoxLayout.of(plan, settings, on_device=True)
    buffers = count_rests(layout) + count_copy_buffers(layout, keeps_copies=settings.may_carry)
    kept = 4 * plan.size + 4 * plan.largest * buffers
    return kept + staging_bytes(plan) + largest_body(codec, plan) + scratch_bytes(codec, plan.largest)


def count_rests(layout: BoxLayout) -> int:
    """Return the number of rests kept from the start: every fragment's feedback, and one for each first slot."""
    return layout.fragments + layout.first_outgoing if layout.feedback else 0


def count_copy_buffers(layout: BoxLayout, *, keeps_copies: bool) -> int:
    """Return the number of buffers that keep copies as they were read: one for each first slot, and one for Δ, which
    otherwise overwrites the copy."""
    return layout.first_outgoing + 1 if keeps_copies else 0


def is_affordable(need: int, free: int | None) -> bool:
    return free is not None and SHARE * need <= free


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that torch could still allocate on the device."""
    if device.type != "cuda":
        return available_bytes()
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + idle


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
