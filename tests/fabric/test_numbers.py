"""Every number that a peer may send, on every route, at its extremes: only refusals, and nothing that shows breaks.

Which numbers there are the types say (`msgspec.inspect`), so a field that is new is tried without a word here. What is
beyond every bound (2⁶³, 10⁴⁰⁰, NaN, infinities, text) is refused while it is read; what a number may be (0, −1, 2³¹) is
for the rules to judge, and must do no harm either.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect
from tests.fabric.fort import TOKENS, Fort
from tests.fabric.test_abuse_learners import ENDS, hello
from tests.syncer.conftest import WAIT_S

from atoll.fabric.wire import ScoreReport, decode_from_learner, decode_from_syncer, decode_score, encode
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import FromLearner, Hello, Welcome
from atoll.syncer.changes import OUTER, RULES

BEYOND: tuple[Any, ...] = (
    *(1e300, float("nan"), float("inf"), float("-inf"), "", "1", "1" * 401, "NaN", [], {}, b"\xff"),
    *(2**48, -(2**48), 2**63, -(2**63), 2**64 - 1),
)
"""No number of a message is one of these; the last five may be measured, but not counted."""
COUNTED = 5
EDGES = (0, -1, 2**31)
"""Some are."""
TEXTS = (
    "-1",
    "1" + "0" * 400,
    str(2**63),
    "NaN",
    "nan",
    "inf",
    "Infinity",
    "1e400",
    "0x10",
    "٣",
    "",
    "one",
    "1_0",
    "+1",
)
"""As words of an address, a header or a setting."""

Path = tuple[Any, ...]


# ---- which numbers there are ----------------------------------------------------------------------------------------


def example(kind: inspect.Type) -> Any:
    """A valid value, with something in every field."""
    match kind:
        case inspect.StructType(fields=fields, array_like=is_list, tag=tag, tag_field=tag_field):
            given = {} if tag is None else {tag_field or "type": tag}
            given |= {field.encode_name: example(field.type) for field in fields}
            return list(given.values()) if is_list else given
        case inspect.IntType():
            return 1
        case inspect.FloatType():
            return 0.5
        case inspect.StrType():
            return "a"
        case inspect.UnionType(types):
            return example(next(one for one in types if not isinstance(one, inspect.NoneType)))
        case inspect.TupleType(types):
            return [example(one) for one in types]
        case inspect.DictType(key, value):
            return {example(key): example(value)}
        case inspect.CollectionType(item):
            return [example(item)]
        case inspect.BoolType():
            return False
        case inspect.LiteralType(values):
            return values[0]
    raise AssertionError(f"no value of {kind} is known: teach me one")


def numbers(value: Any, path: Path = ()) -> Iterator[Path]:
    """The places of all numbers in a plain value."""
    if type(value) in (int, float):
        yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from numbers(item, (*path, key))


def at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def beyond(value: Any, path: Path) -> tuple[Any, ...]:
    return BEYOND[:-COUNTED] if type(at(value, path)) is float else BEYOND


def changed(value: Any, path: Path, to: Any) -> Any:
    value = deepcopy(value)
    at(value, path[:-1])[path[-1]] = to
    return value


MESSAGES = {kind.__name__: example(inspect.type_info(kind)) for kind in get_args(FromLearner)}
PLACES = [(name, path) for name, message in MESSAGES.items() for path in numbers(message)]


def test_all_of_them_are_found() -> None:
    found = {(name, path[0]) for name, path in PLACES}
    for name, field in (("Progress", "busy_s"), ("Progress", "tape"), ("Hello", "clock"), ("Settled", "size")):
        assert (name, field) in found
    assert len(PLACES) > 90
    for message in MESSAGES.values():
        assert decode_from_learner(msgspec.msgpack.encode(message))


# ---- at the wire ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "path"), PLACES, ids=str)
def test_a_number_of_a_message_beyond_all_bounds_is_refused(name: str, path: Path) -> None:
    for extreme in beyond(MESSAGES[name], path):
        with pytest.raises(PeerError, match="could not be read"):
            decode_from_learner(msgspec.msgpack.encode(changed(MESSAGES[name], path, extreme)))
    for edge in (0, 2**31):
        decode_from_learner(msgspec.msgpack.encode(changed(MESSAGES[name], path, edge)))


SCORE = {"round": 7, "loss": 1.5, "cpu_s": 0.1}
JSON = (
    "1" + "0" * 400,
    "-1" + "0" * 400,
    "1e400",
    "1e300",
    "NaN",
    "Infinity",
    '"7"',
    "[]",
    "{}",
)


def score(field: str, value: str) -> bytes:
    """As text, since there are numbers that json would not write."""
    rest = {key: json.dumps(given) for key, given in SCORE.items()} | {field: value}
    return ("{" + ", ".join(f'"{key}": {given}' for key, given in rest.items()) + "}").encode()


@pytest.mark.parametrize("field", SCORE)
def test_a_number_of_a_score_beyond_all_bounds_is_refused(field: str) -> None:
    assert decode_score(json.dumps(SCORE).encode()) == ScoreReport(round=7, loss=1.5, cpu_s=0.1)
    for value in JSON:
        with pytest.raises(PeerError, match="could not be read"):
            decode_score(score(field, value))
    for value in () if field == "loss" else ("-1", str(2**48), str(2**63)):
        with pytest.raises(PeerError, match="could not be read"):
            decode_score(score(field, value))


# ---- at the door ----------------------------------------------------------------------------------------------------


async def shows(fort: Fort) -> None:
    """Status, metrics and dashboard, as a viewer gets them."""
    for path in ("/v1/status", "/metrics", "/"):
        status, said = await fort.request("GET", path, "look")
        assert status == 200, f"{path}: {status} {said[:200]}"
    socket = await fort.socket("look", "/v1/live", headers={"Origin": f"https://127.0.0.1:{fort.port}"})
    async with asyncio.timeout(WAIT_S):
        assert json.loads((await socket.receive()).data)["type"] == "snapshot"


async def test_one_score_of_401_digits_breaks_neither_status_nor_metrics(fort: Fort) -> None:
    await fort.open()
    before = await fort.digest()
    for field in SCORE:
        for value in JSON:
            status, reason = await fort.request("POST", "/v1/scores", "score", data=score(field, value))
            assert (status, "could not be read" in reason) == (400, True), (field, value[:20], status, reason)
    await shows(fort)
    await fort.unharmed(before)
    assert not [line for line in fort.stage.lines if line["kind"] == "score"]


SETTINGS = ("1" + "0" * 400, "-1" + "0" * 400, str(2**63), "-2", "NaN", "nan", "inf", "-inf", "1e400", "1e300", "{}")


@pytest.mark.parametrize("one_in", [4, pytest.param(1, marks=pytest.mark.faults)])
async def test_a_setting_at_its_extremes_is_refused(fort: Fort, one_in: int) -> None:
    """Every setting, and every extreme; one in four of their pairs."""
    await fort.open()
    before = await fort.digest()
    for key, text in list(product([*RULES, *OUTER], SETTINGS))[::one_in]:
        status, reason = await fort.request("POST", "/v1/settings", "boss", data=json.dumps([f"{key}={text}"]).encode())
        assert status in (400, 409), (key, text, status, reason)
    await shows(fort)
    await fort.unharmed(before)


@pytest.mark.parametrize("text", [*TEXTS, "0", str(2**31)])
async def test_a_number_in_an_address_or_a_header_is_refused(fort: Fort, text: str) -> None:
    await fort.open()
    rogue, pull = await fort.asked()
    before = await fort.digest()
    data, ticket = fort.values(pull, 1e-3), "0" * 32
    own = {"Atoll-Session": rogue.session, "Atoll-Learner": rogue.name, "Atoll-Digest": "0" * 32}
    for method, path in (
        ("PUT", f"/v1/contributions/{rogue.name}/{text}/0"),
        ("PUT", f"/v1/contributions/{rogue.name}/{pull.round}/{text}"),
        ("PUT", f"/v1/initial/{rogue.name}/{text}"),
        ("GET", f"/v1/fragments/{text or '9'}"),
        ("PUT", f"/v1/probe/{text or '9'}"),
    ):
        if text == "0" and method == "GET":
            continue  # there is one
        status, reason = await fort.request(method, path, "eu", own, data)
        assert 400 <= status < 500, (method, path, status, reason)
    for headers in (
        {"Atoll-Offset": text, "Atoll-Size": "9"},
        {"Atoll-Offset": "0", "Atoll-Size": text},
    ):
        plain = {key: value.encode("ascii", "replace").decode() for key, value in headers.items()}
        status, reason = await fort.request("PUT", f"/v1/relay/{ticket}", "eu", {**own, **plain}, data)
        assert 400 <= status < 500, (headers, status, reason)
    asked = {"Range": f"bytes={text}-".encode("ascii", "replace").decode()}
    status, reason = await fort.request("GET", f"/v1/relay/{ticket}", "eu", {**own, **asked})
    assert 400 <= status < 500, (asked, status, reason)
    if text != "0":  # the whole may be asked for
        status, reason = await fort.request("GET", "/v1/fragments/0", "eu", asked)
        assert status == 400, (asked, status, reason)
    await shows(fort)
    await fort.unharmed(before)


LENGTHS = ("-1", str(2**31), str(2**63), "1" + "0" * 400, "NaN", "inf", "1e3", "٣", "0x10", "")
ROUTES = ("POST /v1/scores", "POST /v1/settings", "PUT /v1/probe/8", "PUT /v1/initial/honest/0")


async def test_a_length_at_its_extremes_is_refused(fort: Fort) -> None:
    await fort.open()
    before = await fort.digest()
    for route, length in product(ROUTES, LENGTHS):
        asked = f"{route} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKENS['boss'].secret}\r\n"
        said = await fort.says(f"{asked}Content-Length: {length}\r\nConnection: close\r\n\r\n{{}}".encode())
        assert said[:10] in ("HTTP/1.0 4", "HTTP/1.1 4"), (route, length, said[:200])
    await shows(fort)
    await fort.unharmed(before)


async def told(fort: Fort, opening: bytes, message: bytes | None) -> int | None:
    """On a channel of its own: the code that it was closed with; None: it was not, and was heard."""
    socket = await fort.socket()
    await socket.send_bytes(opening)
    async with asyncio.timeout(WAIT_S):
        if message is not None:
            # What waited for the disk, for the process that had the name before, may come first.
            while not isinstance(decode_from_syncer((await socket.receive()).data), Welcome):
                pass
            await socket.send_bytes(message)
        await socket.send_bytes(b"\xc1")  # no message at all: whatever came before it, this closes the channel
        while (await socket.receive()).type not in ENDS:
            pass
    return socket.close_code


@pytest.mark.parametrize("name", [name for name in MESSAGES if name != "Hello"])
@pytest.mark.parametrize("edges", [1, pytest.param(len(EDGES), marks=pytest.mark.faults)])
async def test_a_message_at_the_extremes_costs_its_sender_the_channel_and_nobody_else(
    fort: Fort, name: str, edges: int
) -> None:
    """Every number of it, once beyond all bounds and at an edge; the edges take turns."""
    await fort.open()
    number = 0
    for place, path in enumerate(numbers(MESSAGES[name])):
        worst = beyond(MESSAGES[name], path)
        for extreme in (worst[place % len(worst)], *(EDGES * 2)[place % len(EDGES) :][:edges]):
            number += 1
            said = changed({**MESSAGES[name], "seq": 6}, path, extreme)
            opening = encode(hello(session=f"s{number}", seq=5))
            assert await told(fort, opening, msgspec.msgpack.encode(said)) is not None, (path, extreme)
    await shows(fort)
    await fort.unharmed(await fort.digest())


async def test_a_hello_at_the_extremes_gets_nobody_in(fort: Fort) -> None:
    await fort.open()
    plain: dict[str, Any] = msgspec.to_builtins(hello())
    plain |= {"clock": {"eu-1": 1}, "versions": [0, 0], "run": "r1", "incarnation": 1, "t": 1, "term": 1, "cut": 0}
    plain |= {"type": Hello.__name__}
    number = 0
    for place, path in enumerate(numbers(plain)):
        for extreme in (BEYOND[place % len(BEYOND)], *EDGES):
            number += 1
            said = changed({**plain, "session": f"s{number}"}, path, extreme)
            assert await told(fort, msgspec.msgpack.encode(said), None) is not None, (path, extreme)
    await shows(fort)
    await fort.unharmed(await fort.digest())
