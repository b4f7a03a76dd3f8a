"""Copies of machines, and when two of them count as the same state.

A state machine is a graph of small objects. `clone` copies all of it that can change and shares what is frozen.
`form` is its canonical form, as a digest: two machines of equal form have done and know the same, whatever the time.

What is left out of the form:
- clock values (CLOCKS): moments, spans, and averages of spans. A moment that may be missing counts as set or not set.
  So of two states that differ only in when a timer fires, the search goes on from the one it reached first;
- texts for people and figures that decide nothing (TALK);
- settings and what a run began with, which are the same in all states of a search.

What stays: every counter, version, step, message and order. A vector clock counts steps and is no time. Every float in
a machine is either named in CLOCKS or TALK or a count of steps (COUNTS); another one is an error, not a guess.
"""

from __future__ import annotations

import hashlib
from collections import deque
from copy import copy
from dataclasses import fields, is_dataclass
from types import FunctionType, MethodType
from typing import Any, TypeVar

import msgspec

from atoll.protocol.records import BegunRecord
from atoll.protocol.settings import Settings

T = TypeVar("T")

CLOCKS = {
    *("now", "wake_at", "deadline", "until", "since", "value", "retry_at", "joined_at", "last_heard", "last_step_at"),
    *(
        "idle_at",
        "paused_at",
        "fell_at_s",
        "_rests_until",
        "probed_at",
        "opened_at",
        "quorum_at",
        "due_at",
        "frozen_at",
        "answered_at",
        "grace_s",
        "busy_s",
        "busy_before",
        "busy_earlier",
        "merge_s",
    ),
    *("asked_at", "missed_at", "deadline_s", "_short_since", "said_at", "_started_at", "_idle_since", "_back_by"),
    *("_stop_by", "_whole_at", "_moved_at", "merging_at", "gap_s", "_counted_at"),
    *("moved_at", "_seen", "_news_at"),  # of a download
    *("up_rate", "down_rate", "up_rates", "down_rates", "up_bytes", "down_bytes"),  # of a link
    "_bodies",  # of a way: bytes, and the seconds they took
    *("_latencies", "_ordered_alone"),
    *("carried_s", "free_at"),  # of the pace
    *("_near_s", "_round_s", "_merges_s"),  # of the interval between rounds
    "_alone",  # what counts of it depends on time
}
TALK = {
    *(
        "reason",
        "why_out",
        "loss",
        "progress",
        "progress_from",
        "weight",
        "failed",
        "last_members",
        "last_reason",
        "_since",
        "_alarmed",
    ),
    *("digest", "_outcome", "_end_reason", "_effects", "text", "data"),
    *("weights", "last_weights", "limits", "limit", "factors", "agreement", "influence"),  # of what was given
    "usual",  # of a life that is judged later than any search looks
    *("missed", "_windows"),  # why tokens were dropped, and what of late was merged: for people
    *("overlaps", "_overlaps"),  # steps from reading to adoption: for people
    *("narrowest", "_told_h"),  # what makes rounds rarer: for people
    *("first_step_s", "lost", "away_s"),  # how long a first step or an absence takes: for people
    "_loss",  # what rounding took from version 0: for people
    "budgeted",  # without a budget of tokens it is what was reported
    *("_live_steps_s", "_stepping_steps_s", "_answers_s"),  # the learners' own times in order
    *("_tokens_per_step", "_known_per_step", "_merged_shares", "merged_share"),  # as `usual` and `_windows`
}
COUNTS = {
    *("clock", "due", "interval", "step", "_ahead", "_anchored_at", "_anchors", "_places", "_sorted", "datasets"),
    *("asked_steps", "share"),  # of a learner's rounds
}
ORDERED = {"waiting", "_asked", "inbox"}
"""Dictionaries of which the order counts."""

_ATOMS = {type(None), bool, int, str, bytes}
_frozen: set[type] = {*_ATOMS, float, tuple, frozenset, FunctionType}
_changing: set[type] = {dict, list, set, deque, MethodType}
_fields: dict[type, tuple[str, ...] | None] = {}
"""Of a class; None: every object of it says so itself."""


def clone(thing: T) -> T:
    """A copy that shares nothing with it that can change."""
    made: T = _clone(thing, {})
    return made


def _clone(thing: Any, memo: dict[int, Any]) -> Any:
    kind = type(thing)
    if kind in _frozen or (kind not in _changing and _is_frozen(kind)):
        return thing
    if (known := memo.get(id(thing))) is not None:
        return known
    made: Any
    if kind is list:
        made = [one if type(one) in _frozen else _clone(one, memo) for one in thing]
    elif kind is dict:
        made = {key: one if type(one) in _frozen else _clone(one, memo) for key, one in thing.items()}
    elif kind is MethodType:
        return MethodType(thing.__func__, _clone(thing.__self__, memo))
    elif kind in (set, deque):
        made = copy(thing)
    else:
        return _clone_object(thing, kind, memo)
    memo[id(thing)] = made
    return made


def _clone_object(thing: Any, kind: Any, memo: dict[int, Any]) -> Any:
    made = memo[id(thing)] = copy(thing) if issubclass(kind, msgspec.Struct) else kind.__new__(kind)
    for name in _names(thing):
        value = getattr(thing, name)
        setattr(made, name, value if type(value) in _frozen else _clone(value, memo))
    return made


def _is_frozen(kind: type) -> bool:
    frozen = issubclass(kind, msgspec.Struct) and kind.__struct_config__.frozen
    frozen = frozen or (is_dataclass(kind) and kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]
    (_frozen if frozen else _changing).add(kind)
    return frozen


def _names(thing: Any) -> tuple[str, ...]:
    kind = type(thing)
    if kind not in _fields:
        if issubclass(kind, msgspec.Struct):
            _fields[kind] = kind.__struct_fields__
        else:
            _fields[kind] = tuple(one.name for one in fields(kind)) if is_dataclass(kind) else None
    known = _fields[kind]
    return known if known is not None else tuple(thing.__dict__)


# ---- the canonical form -------------------------------------------------------------------------------------------


def form(*things: Any) -> bytes:
    """A digest of all that counts in them."""
    flat: list[Any] = []
    for thing in things:
        _flatten("", thing, flat, {})
    return hashlib.blake2b(repr(flat).encode(), digest_size=16).digest()


def _flatten(name: str, thing: Any, flat: list[Any], seen: dict[int, int]) -> None:
    kind = type(thing)
    if kind in _ATOMS:
        flat.append(thing)
    elif kind is list or kind is tuple or kind is deque:
        flat.append(len(thing))
        for value in thing:
            if type(value) in _ATOMS:
                flat.append(value)
            else:
                _flatten(name, value, flat, seen)
    elif kind is dict:
        flat.append(len(thing))
        for key in thing if name in ORDERED else sorted(thing):
            flat.append(key)
            _flatten(name, thing[key], flat, seen)
    elif kind is float:
        assert name in COUNTS, f"{name} is a float: name it in CLOCKS, TALK or COUNTS"
        flat.append(round(thing, 6))
    elif kind is set or kind is frozenset:
        flat.append(sorted(thing))
    elif kind not in _CONSTANT:
        _flatten_object(thing, flat, seen)


_CONSTANT = (MethodType, FunctionType, Settings, BegunRecord)


def _flatten_object(thing: Any, flat: list[Any], seen: dict[int, int]) -> None:
    if (number := seen.get(id(thing))) is not None:
        flat.append(("again", number))
        return
    seen[id(thing)] = len(seen)
    flat.append(type(thing).__name__)
    for name in _names(thing):
        if name not in _LEFT_OUT:
            value = getattr(thing, name)
            if type(value) in _ATOMS:
                flat.append(value)
            else:
                _flatten(name, value, flat, seen)
        elif name in CLOCKS:
            value = getattr(thing, name)  # of a table of moments: which there are
            flat.append(sorted(value) if isinstance(value, dict) else value is not None)


_LEFT_OUT = CLOCKS | TALK
