"""The run's events: one JSON object a line, `{"at": seconds, "kind": …, "text": …, …}`.

`text` is a sentence for people, the other fields are for programs; the summary, the screen and later the report are
folds over these lines. Several processes append to the same file; a line is written with one call. What a learner
causes fills no disk: texts are clipped, and of each learner so many bytes are written at once, and so many a second;
of hellos that are refused, which may come under any name, so many of each token.

| kind | said by | fields beside `text` |
| --- | --- | --- |
| run | syncer | run, learners, settings, versions (of Python, packages, platform); data_parallel: the processes of a
data-parallel run |
| plan | syncer | settings (P and H filled in), parameters, data |
| waiting | syncer | missing, seconds: the first parameters are here, and so many more learners are waited for |
| joined | syncer | learner, incarnation, declared (tokens per step), known_as (its incarnation before; 0: none) |
| fetching | syncer | learner, whole_bytes, lacking_bytes, left_s: on its way into the run |
| initial | syncer | relative_error (of its rounding, with `initial_codec = "bf16"`): version 0 is here |
| begun | syncer | seconds (since the first parameters): the learners hold version 0, and training begins |
| recovered | syncer | learner, incarnation, seconds; busy_before: seconds that its process had been stepping when this
syncer first heard of it |
| returned | syncer | learner, incarnation, away_s, t, steps (made meanwhile; merged, kept or dropped, as means over the
fragments), weight_share (share of their weight that they get in the next rounds) |
| lost, left | syncer | learner, incarnation, t, tokens, busy_s, reason, unmerged_tokens, moved (it goes back to its
relay) |
| round | syncer | round, fragment, version, attempt, live, members, gather_s, sync_s, merge_s, grace_s, effective_h,
step (of the run), rho and outer_step (docs/algorithm.md; null for the first of a fragment in a term) |
| passed | syncer | round, fragment: a round that was given up |
| starting | syncer | learner: it is in its first step (torch.compile?) and is not waited for; no fault |
| refused, quarantined, muted, probed | syncer | learner (refused: round; quarantined: times of late, wait_s until
rounds take from it again) |
| helping, helped, fresh | syncer | learner: who takes whose inner optimizer's state, or why nobody's |
| reigned | syncer | run, term, round, cut, replayed, learners, settings: a new term goes on with the run |
| cut | syncer | cut, learners, left_out: a cut is complete |
| changed | syncer | what: settings that the operator changed; learners, sync_every, … if these did |
| scaled | supervisor | added, removed: learners, as `atoll scale` or a plan of hours asked |
| planned | supervisor | planned, learners: how many learners a plan of hours has, of how many |
| phase | syncer | training_phase, sync_every, overlap, adopt: another phase of training begins |
| alarm | syncer | over: no commits, or again; the loss is bad (round, loss, best, good); the numbers of every learner
are not finite (about: numbers); the dashboard failed |
| restored | syncer | round, committed, versions, fragment_tokens, suspects: the run is rolled back to that round |
| relay | syncer | relay, gone: a relay is connected, or is gone |
| turned_away | syncer | address (or a learner's name), reason, count: somebody was not let in |
| renewed | syncer | the syncer shows a new certificate |
| unbalanced | syncer | learner: what it reports does not fit the ledger |
| low_share | syncer | learner, share, others, over: its work is merged far less than the others', or is again |
| suspect | syncer | learner, agreement, over: what it gives is not trusted, or is again |
| above | syncer | learner, declared: its steps have far more tokens than the others' |
| same_batches | syncer | learner, other: both train on the same batches |
| score | syncer | round, loss, cpu_s, sample, final; not_finite (the loss); where the scorer gives them: metrics,
directions, unit |
| evaluator | syncer | gone: an evaluator is here, or is gone |
| pace | syncer | h, asked, part, narrowest: rounds have another H than before; `part` makes it larger than was asked
("way down of site-2"), `narrowest` has its figures too |
| share | syncer | learner, share: its link carries only this share of the rounds, or every round again (1) |
| standstill | syncer | seconds: it stood still, and nobody's silence counts for that time |
| ending | syncer | |
| closing | syncer, supervisor | what the end of the run waits for: the model, the last score, scripts |
| finished | syncer | reason, learners (t, tokens, busy_s), computed_before (tokens, when this syncer began), bytes_in,
bytes_out; relays: bytes_in and bytes_out of each; the account of the whole run: round (how many were closed), rounds
(in which something was merged), tokens, dropped_by_cause, merged_share, fates, fragments (of each its version and the
tokens merged) |
| started, exited, restarted, killed | supervisor | process (and pid, code; ranks: the pids of a learner's ranks but
the first, by the names of their logs; fresh: these ranks have no snapshot to go on from; stepless: killed at the end,
since it had made no step; unjoined: SIGTERM ended it before it joined); a syncer by hand says its own start |
| devices | supervisor | which process has which GPUs |
| chaos, fault, mended | chaos | fault: number, what, targets, target, seconds, size; mended: number |
| courier, warning | learner; warning: supervisor too | about: "after the end" where a script goes on after its run |

A round of many members names all of them only now and then (round_members.py); then it has `of`, their number, and
`tokens` and `filtered`, sums over all.

`live` of a round: learners alive and recovered when it was frozen, without those whose links carry only a share of
the rounds and that had no turn in it (`share`). A member of a round has learner, incarnation, t,
steps, tokens, weight, base, since (its steps since the last sync), loss (the newest training loss it told, or null),
agreement (its median cosine with the others'), influence (its share of the merge) and filtered (tokens of it that the
outlier filter left out). `fates`: per learner, its tokens
by fate, dropped_by_cause, merged_share, steps and rounds.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from atoll.protocol.limits import Budgets, clipped

TEXT_CHARS = 4000
"""Of a text in an event."""
LEARNER_BYTES = 256 * 1024
"""Events about one learner at once: a thousand or so …"""
LEARNER_RATE = 4096
"""… and bytes a second after that. Whoever makes more of them is not written about any more."""

AFTER_END = "after the end"
"""What a warning is about where a script goes on after its run is over."""

Sink = Callable[[bytes], None]
Event = dict[str, Any]


class EventLog:
    """Stamps events with the time and hands each as one line to a sink."""

    def __init__(self, sink: Sink, clock: Callable[[], float] = time.time) -> None:
        self._sink = sink
        self._clock = clock
        self._room = Budgets(LEARNER_BYTES, LEARNER_RATE)
        self._too_many: set[str] = set()
        self._closed = False

    def close(self) -> None:
        """Leave out what is said from now on. A syncer that fails closes its connections last, and each would tell of
        its own end in the events of a run that another syncer may serve by then."""
        self._closed = True

    def say(self, kind: str, text: str, data: dict[str, object] | None = None, *, whose: str = "") -> None:
        """`whose`: who causes it, where that is not the learner that it names."""
        if self._closed:
            return
        event: Event = {"at": round(self._clock(), 6), "kind": kind, "text": text, **(data or {})}
        event = {name: clipped(value, TEXT_CHARS) if isinstance(value, str) else value for name, value in event.items()}
        line = msgspec.json.encode(event) + b"\n"
        who = whose or str(event.get("learner", ""))
        if not who or self._room.take(who, event["at"], len(line)):
            self._sink(line)
        elif who not in self._too_many:
            self._too_many.add(who)
            self.say("warning", f"{who} makes more events than are written down: some of them are left out")


def parse(lines: Iterable[bytes]) -> Iterator[Event]:
    """The events of a file; lines that were cut off (a crash, a full disk) or are none are left out."""
    for line in lines:
        if line.endswith(b"\n") and line.strip():
            try:
                event = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if isinstance(event, dict) and "at" in event and "kind" in event:
                yield event


PACKAGES = ("atoll", "torch", "numpy", "numba", "aiohttp")


def versions() -> dict[str, str]:
    """Versions of Python, the packages and the platform. Read from metadata: importing torch would take seconds."""
    packages = {name: found for name in PACKAGES if (found := _version(name))}
    return {"python": platform.python_version(), **packages, "platform": platform.platform()}


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
