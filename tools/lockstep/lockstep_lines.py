"""Read what a run left, as lines of text that are equal in every run of the same case.

Sections, each a list of lines:

    journal   the journal's decisions, in order: rounds, versions, terms, settings, the end
    members   its other records, sorted: joins, ends of lives, cuts, leases, which may come in any order
    tapes     for every learner its tape's adoptions, marks of cuts, leases and states taken, in order, but for those
              before the first step, which come in any
    adopted   for every learner (fragment, version, rule, step, steps kept, dropped), as its training process said
    shards    each other shard's own chain, in order
    sums      what relays summed: round, fragment, members, weights
    sent      messages and frames of each process over each kind of channel, as often as each was sent
    answers   requests to the syncer, its shards and relays, and their answers
    events    what events.jsonl tells people
    model     digest of the finished model's tensors

`sent`, `answers` and `events` are sorted: two learners, and two shards, may come in either order. A line is equal in
every run because `LEFT_OUT`, `LEFT_OUT_OF` and those that begin with `CHANCE` name what is not, and why. `mask` puts #
in the place of digests and measures of values, which depend on the machine's arithmetic.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from safetensors.numpy import load_file

from atoll.protocol.messages import MOST_SHARDS
from atoll.protocol.records import (
    AnyRecord,
    BegunRecord,
    ChangedRecord,
    EndedRecord,
    MergedRecord,
    PassedRecord,
    PlayedRecord,
    ResetRecord,
    RestoredRecord,
    StartedRecord,
    TermRecord,
)
from atoll.protocol.tape import BeganEntry, InformedEntry, StoppedEntry
from atoll.store.disk import LocalDisk
from atoll.store.journal import read

Sections = dict[str, list[str]]

DECISIONS = (
    BegunRecord, TermRecord, StartedRecord, MergedRecord, PassedRecord, ResetRecord, RestoredRecord, ChangedRecord,
    EndedRecord,
)  # fmt: skip

LEFT_OUT = {
    "run": "is drawn for each run",
    "session": "is drawn for each process",
    "atoll-session": "is drawn for each process",
    "process": "is drawn for each process",
    "atoll-relay": "is drawn for each relay's process",
    "secret": "is drawn for each learner",
    "proof": "is made from a secret",
    "ticket": "is drawn for each transfer of a state",
    "token": "is a secret where there is one",
    "inputs": "depends on where the batches lie in memory",
    "pid": "is the operating system's",
    "host": "is the name of this machine",
    "url": "has a free port in it",
    "leader": "has a free port in it",
    "addresses": "has free ports in it",
    "shards": "has free ports in it, or is the layout's own",
    "succeeds": "is of earlier runs",
    "seconds": "is time",
    "busy_s": "is time",
    "latency_s": "is time",
    "deadline_s": "follows from measured times",
    "seq": "begins with a random number",
    "clock": "is higher in a message that another one overtook",
    "before_bytes": "counts tapes, which come in as many parts as chance has it",
    "before_hash": "is of records with tapes among them",
    "head": "is of a chain that begins with the run's name",
    "heads": "are of chains that begin with the run's name",
    "begun": "is the journal's first record, with the run's name",
    "manifest": "is a digest of text with times in it",
    "file": "is named by chance",
    "slot": "is whichever was free first",
    "taped": "counts entries of tapes, which come in as many parts as chance has it",
    "tape": "comes in as many parts as chance has it: the section of tapes has it all",
    "settings": "is the case's own",
    "kept": "has the cuts that are complete by then",
    "cuts": "has the cuts that are complete by then",
}
"""Fields that differ between two runs of a case, and why."""

VALUES = {"digest", "digests", "squares", "buffers", "moved", "marks", "factors", "atoll-digest", "atoll-steps", "data",
          "norm", "loss"}  # fmt: skip
"""Fields that depend on the bits of values, and so on how the machine multiplies."""

LEFT_OUT_OF = {
    "Saved": ("digest", "is of a state with times in it"),
    "CutSaved": ("digest", "is of a state with times in it"),
    "CutHere": ("digest", "is of a part with the run's name in it"),
    "PartFetched": ("nbytes", "counts what came behind the first piece"),
}
"""Fields that differ in these messages and frames alone, and why."""

CHANCE = {
    "Progress": "is sent after as many steps as chance has it",
    "Heartbeat": "is sent when nothing else was for a while",
    "Traffic": "is sent once a second",
    "RelayRates": "is sent when a rate has changed",
    "RunProgress": "of two that wait only the newest is sent",
    "JoinProgress": "is sent twice a second",
    "StepReport": "is sent after every step; what it leads to is here",
    "Told": "carries the tape",
    "Arriving": "is told when little is still to come",
    "PartArriving": "is told when little is still to come",
    "PartLacking": "is sent twice a second",
    "Goodbye": "comes or is too late where a process ends",
}
"""Messages and frames that are sent as often as chance has it, and why."""

CHANCE_ENTRIES = (BeganEntry, InformedEntry, StoppedEntry)
"""Entries of tapes that name the machine, are made as often as chance has it, or come before or after others."""

CHANCE_EVENTS = {
    "run": "names the run",
    "started": "names a process",
    "standstill": "comes on a busy machine",
    "waiting": "says how long",
    "fetching": "is told twice a second",
}
"""Events that say something else in every run, or come by chance."""

FINISHED = ("reason", "round", "rounds", "tokens", "dropped_by_cause", "fates", "fragments")
"""What the last event says of the whole run."""

DURATION = re.compile(r" after [0-9.]+ m?s\b")
DIGEST = re.compile(r"\b[0-9a-f]{32,}\b")
BODIES = ("/v1/contributions/", "/v1/initial/", "/v1/fragments/", "/v1/moments/", "/v1/sums/", "/v1/held/")


def read_sections(folder: Path) -> Sections:
    """Read the run in this folder (`LockstepRun.folder`)."""
    out, disk = folder / "run", LocalDisk()
    journal = [record for _, record in read(out / "journal", disk=disk)]
    tapped = [line for path in sorted((folder / "tap").glob("*.jsonl")) for line in _read_tap(path)]
    return {
        "journal": [_show(record) for record in journal if isinstance(record, DECISIONS)],
        "members": sorted(_show(record) for record in journal if not isinstance(record, (*DECISIONS, PlayedRecord))),
        "tapes": list(_read_tapes(journal)),
        "adopted": [line for *_, line in sorted(_list_adopted(tapped), key=lambda found: found[:3])],
        "shards": [
            line for number in range(2, MOST_SHARDS) for line in _read_chain(out / "shards" / str(number), number)
        ],
        "sums": sorted(_read_sums(folder / "relay" / "sums.jsonl")),
        "sent": count(_list_sent(tapped)),
        "answers": count(_list_answers(tapped)),
        "events": count(_list_events(out / "events.jsonl")),
        "model": _read_model(out / "model.safetensors"),
    }


def mask(line: str) -> str:
    """Return the line without what depends on the bits of values."""
    kind, _, data = line.partition(" {")
    return f"{kind} {_dump(_masked(json.loads('{' + data)))}" if data else DIGEST.sub("#", line)


def count(lines: Iterator[str]) -> list[str]:
    """Sort lines, by what does not depend on the bits of values; each comes once, with how often it came."""
    return sorted((f"{number}× {line}" for line, number in Counter(lines).items()), key=lambda line: (mask(line), line))


# ---- what lies in the run's folder ----------------------------------------------------------------------------------


def _read_tapes(journal: list[AnyRecord]) -> Iterator[str]:
    entries: dict[str, dict[int, Any]] = {}
    for record in journal:
        for tape in record.tapes if isinstance(record, PlayedRecord) else ():
            known = entries.setdefault(f"{tape.learner}.{tape.incarnation}", {})
            known.update(enumerate(tape.entries, start=tape.first))
    for name, tape in sorted(entries.items()):
        kept = [entry for _, entry in sorted(tape.items()) if not isinstance(entry, CHANCE_ENTRIES)]
        early = sorted(_show(entry) for entry in kept if entry.t == 0)
        yield from (f"{name} {line}" for line in (*early, *(_show(entry) for entry in kept if entry.t > 0)))


def _read_chain(folder: Path, number: int) -> Iterator[str]:
    if folder.exists():
        for _, record in read(folder / "journal", disk=LocalDisk()):
            yield f"shard {number}: {_show(record)}"


def _read_sums(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines() if path.exists() else ():
        yield f"sum {_dump(json.loads(line))}"


def _read_model(path: Path) -> list[str]:
    hashed = hashlib.blake2b(digest_size=16)
    for name, values in sorted(load_file(path).items()):
        hashed.update(f"{name} {values.dtype} {values.shape}".encode() + values.tobytes())
    return [f"model {hashed.hexdigest()}"]


def _list_events(path: Path) -> Iterator[str]:
    for event in map(json.loads, path.read_text().splitlines()):
        if event["kind"] not in CHANCE_EVENTS:
            yield f"{event['kind']}: {DURATION.sub('', event['text'])}"
        if event["kind"] == "finished":
            yield f"account {_dump({name: event[name] for name in FINISHED if name in event})}"


# ---- what was tapped ------------------------------------------------------------------------------------------------


def _read_tap(path: Path) -> Iterator[dict[str, Any]]:
    name = path.name.rsplit(".", 2)[0]
    for line in path.read_text().splitlines():
        yield {"by": name, **json.loads(line)}


def _list_sent(tapped: list[dict[str, Any]]) -> Iterator[str]:
    reported: set[str] = set()
    for line in tapped:
        if "sent" in line:
            kind, data = line["sent"].pop("type"), line["sent"]
            if line["on"] == "/v1/control":
                data.pop("cut", None)  # the newest cut that it knows of, in every message
        elif "frame" in line or "heard" in line:
            kind, data = line.get("frame") or line["heard"]
        else:
            continue
        if kind == "Progress" and line["by"] not in reported:
            reported.add(line["by"])
            yield f"{line['by']} lacks at first {data.get('lacking_bytes', 0)} bytes"
        if kind in LEFT_OUT_OF:
            data.pop(LEFT_OUT_OF[kind][0], None)
        if kind not in CHANCE:
            way = "hears" if "heard" in line else "sends"
            yield f"{line['by']} {way} {kind} on {line.get('on', 'training')} {_dump(data)}"


def _list_answers(tapped: list[dict[str, Any]]) -> Iterator[str]:
    for line in tapped:
        if "asked" in line and any(place in line["asked"] for place in BODIES):
            answer = {name: line[name] for name in ("with", "answered", "said") if line.get(name)}
            yield f"{line['by']} answers {line['asked']}: {line['status']} {_dump(answer)}"


def _list_adopted(tapped: list[dict[str, Any]]) -> Iterator[tuple[str, int, int, str]]:
    """Pair what each training process was ordered to adopt with what it says of it. Yield process, step, and fragment
    where it is adopted before the first step: versions 0 come in any order."""
    rules: dict[tuple[str, int, int], str] = {}
    for line in tapped:
        kind, data = line.get("frame") or line.get("heard") or ("", {})
        if kind == "AdoptOrder":
            rules[line["by"], data["fragment"], data["version"]] = data["rule"]
        elif kind == "VersionTaken":
            adopted = data["adopted"]
            rule = rules.get((line["by"], adopted["fragment"], adopted["version"]), "?")
            place = adopted["fragment"] if adopted["t"] == 0 else 0
            yield line["by"], adopted["t"], place, f"{line['by']} adopts {_dump({**adopted, 'rule': rule})}"


# ---- lines ----------------------------------------------------------------------------------------------------------


def _show(record: msgspec.Struct) -> str:
    return f"{type(record).__name__} {_dump(_name_fields(record))}"


def _name_fields(value: Any) -> Any:
    """Return what msgspec.to_builtins does, but with the names of fields also where a struct is written as an array."""
    match value:
        case msgspec.Struct():
            return {name: _name_fields(getattr(value, name)) for name in value.__struct_fields__}
        case list() | tuple():
            return [_name_fields(one) for one in value]
        case bytes():
            return value.hex()
        case msgspec.UnsetType():
            return None
    return value


def _dump(value: Any) -> str:
    return json.dumps(_pruned(value), sort_keys=True, default=str)


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _pruned(one) for name, one in value.items() if name.lower() not in LEFT_OUT}
    return [_pruned(one) for one in value] if isinstance(value, list) else value


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: "#" if name in VALUES and one else _masked(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_masked(one) for one in value]
    return DIGEST.sub("#", value) if isinstance(value, str) else value
