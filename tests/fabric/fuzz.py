"""Inputs that no honest peer sends: seeded, and made from valid messages of every type that the wire knows.

What is valid the types themselves say (`msgspec.inspect`): a message or a field that is new is fuzzed without a word
here. A valid message is spoilt in its bytes (flipped, cut, spliced, lengths that claim 2³² elements, no UTF-8, keys
said twice, what msgpack knows and we do not) or in its meaning (wrong types, numbers at the edge, unknown tags and
fields, names that are paths). A few are as large as a frame may be, for those that cost time and memory.
"""

from __future__ import annotations

import json
import os
import random
import struct
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec
from msgspec.inspect import multi_type_info

from atoll.fabric.wire import (
    ScoreReport,
    check_hello,
    decode_from_learner,
    decode_from_syncer,
    decode_score,
    decode_words,
)
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import PROTOCOL, FromLearner, FromSyncer, Hello, TensorSpec

Kind = Literal["learner", "syncer", "score", "words"]
Spoil = Callable[[bytes], bytes]

LARGE = 5000
"""One in so many is as large as may be."""
FRAME_BYTES = 4 << 20
JSON_BYTES = 1 << 20
EACH = 24
"""Valid messages of each type to begin with."""

NAMES = (
    *(
        "",
        ".",
        "..",
        "../../etc/passwd",
        "/",
        "a/b",
        "a\\b",
        "a\x00b",
        "a\nb",
        "learner-0\u2028",
        "\u202egnp",
        "\ufeff",
    ),
    *(
        "nul\x00",
        "con",
        "a" * 64,
        "a" * 65,
        "a" * 100_000,
        "é" * 64,
        "\U000e0001" * 64,
        "\x1b[2J",
        "%s%n",
        "{0}",
        "\u200b",
    ),
    *("syncer", "learner-0", "-rf", "1" * 5000, "blocks." + "9" * 5000),
)
EDGES: tuple[Any, ...] = (
    *(0, -1, 1, 2**31, -(2**31), 2**32, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, 1e308, -1e308, 5e-324),
    *(float("nan"), float("inf"), float("-inf"), 0.5, True, False, None, "", "1", b"", b"\xff" * 9, [], {}),
    *([[]] * 3, {"": 1}, {"type": "Hello"}, [None] * 40, "x" * 5000, "\u2028" * 400, "\x00", [2**63 - 1] * 40),
    *(msgspec.msgpack.Ext(0, b""), msgspec.msgpack.Ext(-1, b"\xff" * 12), msgspec.msgpack.Ext(127, b"x" * 300)),
)
HEADERS = (
    *(b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdd\x7f\xff\xff\xff", b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff"),
    *(b"\xd9\xff", b"\xda\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc4\xff", b"\xc5\xff\xff", b"\xc6\xff\xff\xff\xff"),
    *(b"\xc1", b"\xc7\x00\x00", b"\xc8\xff\xff\x01", b"\xc9\xff\xff\xff\xff\x01", b"\xd4\x01\x00", b"\xd8\x05"),
    *(b"\xd6\xff\x00\x00\x00\x00", b"\xca\x7f\xc0\x00\x00", b"\xcb\x7f\xf0" + b"\0" * 6, b"\xcf" + b"\xff" * 8),
    *(b"\xd3\x80" + b"\0" * 7, b"\xa2\xc3\x28", b"\xa3\xed\xa0\x80", b"\xa1\xff", b"\x80", b"\x90", b"\xc0"),
)


class Input(NamedTuple):
    kind: Kind
    data: bytes
    how: str
    """What was done to it, for whoever has to find out."""


class Fuzz:
    """An endless stream of inputs; the same seed gives the same."""

    def __init__(self, seed: int, tensors: tuple[TensorSpec, ...] = ()) -> None:
        """`tensors`: of a run, so that some hellos fit it."""
        self.dice = random.Random(seed)
        self._tensors = msgspec.to_builtins(tensors)
        self._pool: dict[Kind, list[bytes]] = {
            "learner": self._valid(FromLearner),
            "syncer": self._valid(FromSyncer),
            "score": [msgspec.json.encode(self._made(info)) for info in multi_type_info([ScoreReport] * EACH)],
            "words": [json.dumps([f"lr={n}", "quorum=2"][: 1 + n % 2]).encode() for n in range(EACH)],
        }
        self._packed: tuple[Spoil, ...] = (
            *(self._flip, self._cut, self._splice, self._inflate, self._overwrite, self._repeat, self._noise),
            *(
                self._misspell,
                self._replace,
                self._replace,
                self._add_field,
                self._drop_field,
                self._rename,
                self._hello,
            ),
            *(self._twice, self._nest),
        )
        self._texts: tuple[Spoil, ...] = (
            *(self._flip, self._cut, self._splice, self._overwrite, self._repeat, self._noise, self._misspell),
            *(self._replace_json, self._json_oddity),
        )

    def inputs(self, count: int) -> Iterator[Input]:
        dice = self.dice
        for _ in range(count):
            if not dice.randrange(LARGE):
                yield dice.choice(large_ones())
                continue
            kind: Kind = dice.choices(("learner", "syncer", "score", "words"), (6, 2, 1, 1))[0]
            data = dice.choice(self._pool[kind])
            spoils = self._packed if kind in ("learner", "syncer") else self._texts
            how = []
            for _ in range(dice.choice((0, 1, 1, 1, 2, 3))):
                spoil = dice.choice(spoils)
                how.append(spoil.__name__)
                data = spoil(data)
            yield Input(kind, data, " ".join(how))

    def hellos(self, count: int) -> Iterator[bytes]:
        """Hellos alone, spoilt in what they say."""
        for _ in range(count):
            data = self._hello(b"")
            yield self._replace(data) if self.dice.random() < 0.3 else data

    # ---- what is valid ------------------------------------------------------------------------------------------

    def _valid(self, union: Any) -> list[bytes]:
        infos = multi_type_info(get_args(union))
        return [msgspec.msgpack.encode(self._made(info)) for info in infos for _ in range(EACH)]

    def _made(self, info: Any) -> Any:
        """A value of a type, as plain data."""
        dice, some = self.dice, range(self.dice.randrange(4))
        match type(info).__name__:
            case "StructType":
                return self._struct(info)
            case "IntType":
                return dice.choice((0, 1, 2, 7, 24, 4096, 2**40, -1)[: None if info.ge is None else -1])
            case "FloatType":
                return dice.choice((0.0, 0.5, 1.5, 1e6))
            case "BoolType":
                return dice.random() < 0.5
            case "StrType":
                return dice.choice(("", "a", "learner-1", "0123456789abcdef", "blocks.3.mlp.weight"))
            case "BytesType":
                return dice.randbytes(8)
            case "NoneType":
                return None
            case "LiteralType":
                return dice.choice(info.values)
            case "UnionType":
                return self._made(dice.choice(info.types))
            case "VarTupleType" | "ListType" | "CollectionType":
                return [self._made(info.item_type) for _ in some]
            case "TupleType":
                return [self._made(item) for item in info.item_types]
            case "DictType":
                return {str(self._made(info.key_type)): self._made(info.value_type) for _ in some}
        raise AssertionError(f"no value of {info} is known: teach me one")

    def _struct(self, info: Any) -> Any:
        given: dict[str, Any] = {} if info.tag_field is None else {info.tag_field: info.tag}
        for field in info.fields:
            if info.array_like or field.required or self.dice.random() < 0.5:
                given[field.encode_name] = self._made(field.type)
        return list(given.values()) if info.array_like else given

    # ---- spoilt bytes -------------------------------------------------------------------------------------------

    def _flip(self, data: bytes) -> bytes:
        spoilt = bytearray(data or b"\0")
        for _ in range(self.dice.choice((1, 1, 2, 8))):
            spoilt[self.dice.randrange(len(spoilt))] ^= 1 << self.dice.randrange(8)
        return bytes(spoilt)

    def _cut(self, data: bytes) -> bytes:
        return data[: self.dice.randrange(len(data) + 1)]

    def _splice(self, data: bytes) -> bytes:
        other = self.dice.choice(self._pool[self.dice.choice(("learner", "syncer", "score", "words"))])
        return data[: self._at(data)] + other[self._at(other) :]

    def _inflate(self, data: bytes) -> bytes:
        """A length that claims more than there is, where a length may stand."""
        places = [at for at, byte in enumerate(data) if 0x80 <= byte <= 0xBF or 0xD9 <= byte <= 0xDF]
        at = self.dice.choice(places) if places else 0
        return data[:at] + self.dice.choice(HEADERS[:11]) + data[at + 1 :]

    def _overwrite(self, data: bytes) -> bytes:
        at = self._at(data)
        return data[:at] + self.dice.choice(HEADERS) + data[at + self.dice.randrange(3) :]

    def _repeat(self, data: bytes) -> bytes:
        first, last = sorted((self._at(data), self._at(data)))
        return data[:last] + data[first:last] * self.dice.choice((1, 2, 30)) + data[last:]

    def _noise(self, data: bytes) -> bytes:
        return self.dice.randbytes(self.dice.choice((0, 1, 2, 9, 60, 400)))

    def _misspell(self, data: bytes) -> bytes:
        """No UTF-8 in a text."""
        at = self._at(data)
        return data[:at] + self.dice.choice((b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8")) + data[at + 1 :]

    def _twice(self, data: bytes) -> bytes:
        """A map that says a key twice."""
        if not data or not 0x81 <= data[0] <= 0x8E:
            return data
        key = self.dice.choice((b"\xa4type", b"\xa5clock", b"\xa4term", b"\xa1t"))
        return bytes([data[0] + 1]) + data[1:] + key + self.dice.choice((b"\x80", b"\x01", b"\xa5Hello", b"\xc0"))

    def _nest(self, data: bytes) -> bytes:
        level = self.dice.choice((b"\x91", b"\x81\xa1a", b"\xdd\0\0\0\1", b"\x92\x01"))
        return data[: self._at(data)] + level * self.dice.choice((10, 1000, 5000)) + self.dice.choice((b"", b"\xc0"))

    def _at(self, data: bytes) -> int:
        return self.dice.randrange(len(data)) if data else 0

    # ---- spoilt meaning -----------------------------------------------------------------------------------------

    def _replace(self, data: bytes) -> bytes:
        return self._edited(data, lambda parent, key: parent.__setitem__(key, self.dice.choice(EDGES)))

    def _edited(self, data: bytes, edit: Callable[[Any, Any], None]) -> bytes:
        """With one place of it changed, however deep it lies."""
        try:
            whole = [msgspec.msgpack.decode(data)]
            edit(*self._place(whole))
            return msgspec.msgpack.encode(whole[0])
        except (msgspec.MsgspecError, ValueError, RecursionError, TypeError, OverflowError):
            return data  # what was done to it before has left nothing to edit

    def _place(self, whole: list[Any]) -> tuple[Any, Any]:
        parent, key = whole, 0
        while True:
            node = parent[key]
            keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
            if not keys or (parent is not whole and self.dice.random() < 0.4):
                return parent, key
            parent, key = node, self.dice.choice(keys)

    def _map(self, data: bytes, edit: Callable[[dict[Any, Any]], None]) -> bytes:
        try:
            whole = msgspec.msgpack.decode(data)
            if isinstance(whole, dict):
                edit(whole)
            return msgspec.msgpack.encode(whole)
        except (msgspec.MsgspecError, ValueError, RecursionError, TypeError, OverflowError):
            return data

    def _add_field(self, data: bytes) -> bytes:
        name = self.dice.choice(("mood", "", "\x1b[2J", "x" * 9000, "__class__", "Type", 5, "type\x00", "\u2029" * 50))
        return self._map(data, lambda whole: whole.__setitem__(name, self.dice.choice(EDGES)))

    def _drop_field(self, data: bytes) -> bytes:
        return self._map(data, lambda whole: whole.pop(self.dice.choice(list(whole)), None) if whole else None)

    def _rename(self, data: bytes) -> bytes:
        tag = self.dice.choice(("", "hello", "Hello\0", "Pickle", "\n" * 500, 5, None, ["Hello"], *NAMES[:3]))
        other = json.loads(self.dice.choice(('"Hello"', '"Progress"', '"Welcome"', '"Contribution"')))
        return self._map(data, lambda whole: whole.__setitem__("type", self.dice.choice((tag, other))))

    def _hello(self, data: bytes) -> bytes:
        dice = self.dice
        hello = {
            "type": "Hello",
            "protocol": dice.choice((PROTOCOL,) * 6 + (-1, 0, 2**63 - 1, PROTOCOL + 1)),
            "learner": dice.choice(NAMES) if dice.random() < 0.3 else f"learner-{dice.randrange(8)}",
            "session": dice.choice(NAMES) if dice.random() < 0.2 else f"s{dice.randrange(8)}",
            "tensors": self._absurd_tensors() if dice.random() < 0.5 else self._tensors,
        }
        for name, values in (
            ("versions", ([], [0, 0], [-1, -1], [2**63 - 1] * 2, [0] * 500)),
            ("incarnation", EDGES[:10]),
            ("t", EDGES[:10]),
            ("term", EDGES[:10]),
            ("cut", EDGES[:10]),
            ("run", ("r1", *NAMES)),
            ("data", NAMES),
            ("clock", ({"syncer": 2**48 - 1}, {"syncer": 2**63 - 1}, {"learner-0": -1}, dict.fromkeys(NAMES, 1))),
        ):
            if dice.random() < 0.15:
                hello[name] = dice.choice(values)
        return msgspec.msgpack.encode(hello)

    def _absurd_tensors(self) -> list[dict[str, Any]]:
        dice = self.dice
        read = ([], [0], [2**31, 2**31], [10**9] * 3, [2**47], [2**47] * 40, [2**40, 0], [3], [2, 2])
        shapes: tuple[list[int], ...] = (*read, [-1], [1, -5], [2**62], [2**63 - 1] * 40, [1] * 300)
        dtypes = ("float32", "float32", "float16", "float64", "pickle", "", "float32\n", "x" * 9000)
        if dice.random() < 0.7:  # within the bounds of the wire: what is wrong with them is found later
            shapes, dtypes = read, dtypes[:-1]
        return [
            {"name": dice.choice((*NAMES, "one", "two")), "shape": dice.choice(shapes), "dtype": dice.choice(dtypes)}
            for _ in range(dice.choice((0, 1, 1, 2, 30)))
        ]

    # ---- JSON ---------------------------------------------------------------------------------------------------

    def _replace_json(self, data: bytes) -> bytes:
        try:
            whole = json.loads(data)
        except (ValueError, RecursionError):
            return data
        keys = list(whole) if isinstance(whole, dict) else list(range(len(whole))) if isinstance(whole, list) else []
        if keys:
            edge = self.dice.choice(EDGES[:22])
            whole[self.dice.choice(keys)] = edge.decode("latin-1") if isinstance(edge, bytes) else edge
        return json.dumps(whole, allow_nan=True).encode()  # NaN and Infinity as words, which no JSON knows

    def _json_oddity(self, data: bytes) -> bytes:
        odd = (b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b'"\\ud800"', b'"\\u0000"', b"[" * 3000, b'{"a":' * 2000)
        other = (
            b"/**/",
            b"\xef\xbb\xbf",
            b"0x10",
            b"01",
            b"-",
            b'"\n"',
            b',"round":1',
            b"1" * 400 + b".5",
            b"'a'",
            b"\0",
        )
        at = self._at(data)
        return data[:at] + self.dice.choice((*odd, *other)) + data[at + self.dice.randrange(4) :]


# ---- what becomes of them --------------------------------------------------------------------------------------------

DECODE: dict[Kind, Callable[[bytes], object]] = {
    "learner": decode_from_learner,
    "syncer": decode_from_syncer,
    "score": decode_score,
    "words": decode_words,
}
LONGEST = 3
"""Times what an honest hello of 40,000 tensors takes in the same process: so long may any input take."""
LINE_CHARS = 300
LOOK_EVERY = 500


class Verdict(NamedTuple):
    inputs: int
    messages: int
    """How many of them were messages."""
    hellos: int
    """How many of those may open a channel."""
    longest_s: float
    """Processor time of the input that took the longest."""
    grown_mib: float
    """The most memory beyond what the process had before the first."""
    wrong: list[str]
    """Inputs that broke the rule, each in a line."""


@cache
def allowed_s() -> float:
    honest = next(given for given in large_ones() if given.how == "40,000 tensors")
    return LONGEST * min(again_s(honest) for _ in range(5))


def campaign(seed: int, count: int) -> Verdict:
    """Whether every input is a message or a PeerError of one line, within its time and memory."""
    limit_s = allowed_s()
    fuzz = Fuzz(seed)
    before, longest_s, most, messages, hellos, wrong = resident_mib(), 0.0, 0.0, 0, 0, []
    for number, given in enumerate(fuzz.inputs(count)):
        began = time.thread_time()
        message, complaint = outcome(given)
        spent = time.thread_time() - began
        if spent > limit_s:  # the collector or the hypervisor may have had a part in it
            spent = min(spent, again_s(given), again_s(given))
        longest_s = max(longest_s, spent)
        messages += message is not None
        hellos += isinstance(message, Hello) and not complaint
        if number % LOOK_EVERY == 0 or len(given.data) > JSON_BYTES // 2:
            most = max(most, resident_mib())
        if spent > limit_s or complaint.startswith("!"):
            wrong.append(f"seed {seed}, input {number} ({given.kind}: {given.how}), {spent:.3f} s: {complaint[:400]}")
    return Verdict(count, messages, hellos, longest_s, max(0.0, most - before), wrong)


def outcome(given: Input) -> tuple[object | None, str]:
    """The message, and why it is refused; a complaint that begins with "!" is our mistake."""
    message = None
    try:
        message = DECODE[given.kind](given.data)
        if isinstance(message, Hello):
            check_hello(message)
    except PeerError as error:
        return message, in_a_line(str(error))
    except Exception as error:
        return message, f"! {error!r}"
    return message, ""


def in_a_line(text: str) -> str:
    good = len(text) <= LINE_CHARS and text.isprintable() and len(text.splitlines()) == 1
    return text if good else f"! not one line of {LINE_CHARS} characters: {text!r}"


def again_s(given: Input) -> float:
    began = time.thread_time()
    outcome(given)
    return time.thread_time() - began


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20


PAGE = os.sysconf("SC_PAGE_SIZE")


# ---- as large as may be ----------------------------------------------------------------------------------------------


@cache
def large_ones() -> tuple[Input, ...]:
    """Made once: they cost more to make than to read."""
    names = {f"{n:x}": 1 for n in range(500_000)}
    full = FRAME_BYTES - 200
    tensors = [_tensor([2**40, n], f"blocks.{n}.mlp.weight") for n in range(40_000)]
    packed: dict[str, bytes] = {
        "40,000 tensors": _packed("Hello", tensors=tensors),
        "more tensors than may be": _packed("Hello", tensors=[_tensor([], "")] * 90_000),
        "a shape of 400,000 dimensions": _packed("Hello", tensors=[_tensor([2**62] * 400_000)]),
        "a name of 4 MB": _packed("Hello", tensors=[_tensor([1], "x" * (full - 200))]),
        "a learner's name of 4 MB": _packed("Hello", learner="\u2028" * (full // 3 - 200)),
        "four million versions": _packed("Hello", versions=[1] * full),
        "a clock of 500,000 names": _packed("Hello", clock=names),
        "the same in a heartbeat": _packed("Heartbeat", clock=names),
        "a clock of a megabyte": _packed("Heartbeat", clock={f"{n:x}": 1 for n in range(140_000)}),
        "a tape of a megabyte": _packed("Progress", steps=[], tokens=[], versions=[], t=0, tape=[["o", 1]] * 250_000),
        "counters of a megabyte": _packed("Progress", steps=[1] * 10**6, tokens=[], versions=[], t=0),
        "a tape of a million": _packed("Progress", tape=[["o", 1]] * 1_000_000),
        "a reason of 4 MB": _packed("Leave", reason="x" * (full - 50)),
        "a reason of a megabyte": _packed("Leave", reason="\u2028" * (10**6 // 3)),
        "an unknown field of 4 MB": _packed("Leave", **{"\u2028x" * (full // 4): 1}),
        "an unknown field of a megabyte": _packed("Leave", reason="", **{"\u2028x" * (10**6 // 4): 1}),
        "an unknown tag of 4 MB": _packed("\x1b[2J " * (full // 5)),
        "a million levels": b"\x81\xa5clock" + b"\x91" * full,
        "keys said again and again": b"\xdf" + struct.pack(">I", 600_000) + b"\xa4term\x01" * 600_000,
        "4 MB of zeros": bytes(full),
    }
    texts: dict[str, tuple[Kind, bytes]] = {
        "a round of a million digits": ("score", b'{"round":' + b"9" * (JSON_BYTES - 20) + b"}"),
        "a million levels of JSON": ("score", b'{"round":' + b"[" * JSON_BYTES),
        "an unknown field in JSON": ("score", b'{"' + b"\\u2028" * 170_000 + b'":1}'),
        "a sample of escapes": ("score", b'{"round":1,"loss":1,"cpu_s":1,"sample":"' + b"\\u2028" * 170_000 + b'"}'),
        "200,000 words": ("words", b"[" + b'"",' * 200_000 + b'""]'),
    }
    return (
        *(Input("learner", data[:FRAME_BYTES], how) for how, data in packed.items()),
        *(Input(kind, data[:JSON_BYTES], how) for how, (kind, data) in texts.items()),
    )


def _packed(tag: str, **fields: Any) -> bytes:
    hello = {"protocol": PROTOCOL, "learner": "a", "session": "s"} if tag == "Hello" else {}
    return msgspec.msgpack.encode({"type": tag, **hello, **fields})


def _tensor(shape: list[int], name: str = "one") -> dict[str, Any]:
    return {"name": name, "shape": shape, "dtype": "float32"}
