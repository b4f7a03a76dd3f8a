"""What a learner says of itself: the messages made of its counters."""

from __future__ import annotations

from atoll.protocol.effects import Saved, Stepped
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
        missed=last.missed if any(last.missed) else (),
        counted=tuple(versions.counted),
        position=last.position,
        seeking=seeking,
        taped=taped,
        tape=entries,
        leaving=last.leaving,
        inputs=last.inputs,
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
