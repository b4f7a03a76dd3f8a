"""What a learner says of itself: its counters after a step or an adoption, and the messages made of them."""

from __future__ import annotations

import msgspec

from atoll.protocol.effects import Adopted, Saved, Stepped
from atoll.protocol.messages import CutSaved, Progress
from atoll.protocol.tape import Spoken
from atoll.protocol.versions import Versions


def progress_of(
    last: Stepped, versions: Versions, offer: int, aims: int, incarnation: int, seeking: bool, tape: Spoken
) -> Progress:
    zeros = (0,) * len(versions.held)
    taped, entries = tape.next()
    return Progress(
        t=last.t,
        steps=last.steps or zeros,
        tokens=last.tokens or zeros,
        versions=tuple(versions.held),
        offer=offer,
        aims=aims,
        tokens_total=last.tokens_total,
        busy_s=last.busy_s,
        loss=last.loss,
        stopped=last.stopped,
        incarnation=incarnation,
        dropped=last.dropped or zeros,
        counted=tuple(versions.counted),
        position=last.position,
        seeking=seeking,
        taped=taped,
        tape=entries,
        leaving=last.leaving,
    )


def cut_saved(saved: Saved, incarnation: int) -> CutSaved:
    return CutSaved(
        of=saved.cut,
        incarnation=incarnation,
        t=saved.t,
        file=saved.file,
        digest=saved.digest,
        reason=saved.reason,
    )


def counted(stepped: Stepped, adopted: Adopted) -> Stepped:
    """The counters after an adoption."""
    if not stepped.steps:
        return stepped
    steps, tokens, dropped = (
        list(stepped.steps),
        list(stepped.tokens),
        list(stepped.dropped) or [0] * len(stepped.steps),
    )
    steps[adopted.fragment], tokens[adopted.fragment] = adopted.steps, adopted.tokens
    dropped[adopted.fragment] = adopted.dropped
    return msgspec.structs.replace(stepped, steps=tuple(steps), tokens=tuple(tokens), dropped=tuple(dropped))


def forgotten(stepped: Stepped, fragments: int) -> Stepped:
    """The counters of another life, which has taken none of its samples yet."""
    zeros = (0,) * fragments
    return msgspec.structs.replace(stepped, steps=zeros, tokens=zeros, dropped=zeros, position=min(0, stepped.position))
