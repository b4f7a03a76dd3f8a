from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.digests import compute_digest
from atoll.fabric.wire import (
    SAMPLE_CHARS,
    FabricLimits,
    ScoreReport,
    check_hello,
    check_syncer_version,
    decode_from_learner,
    decode_from_syncer,
    decode_score,
    encode,
    one_line,
)
from atoll.protocol.errors import ConfigError, PeerError
from atoll.protocol.messages import (
    OLDEST,
    PROTOCOL,
    Announce,
    Box,
    Contribution,
    Decline,
    Ending,
    Finish,
    FromLearner,
    FromSyncer,
    Heartbeat,
    Hello,
    Leave,
    Member,
    Progress,
    Pull,
    Refused,
    Register,
    Started,
    TensorSpec,
    Welcome,
)
from atoll.protocol.settings import Settings
from atoll.protocol.tape import BeganEntry

number = st.integers(0, 2**48 - 1)
numbers = st.lists(number, max_size=4).map(tuple)
text = st.text(max_size=20)
clock = st.dictionaries(text, number, max_size=3)
share = st.floats(0, 1)

from_learner: st.SearchStrategy[FromLearner] = st.one_of(
    st.builds(
        Hello,
        clock=clock,
        protocol=number,
        learner=text,
        session=text,
        run=text,
        versions=numbers,
        t=number,
        tensors=st.lists(st.builds(TensorSpec, text, numbers, text, st.booleans()), max_size=3).map(tuple),
    ),
    st.builds(
        Progress,
        clock=clock,
        t=number,
        steps=numbers,
        tokens=numbers,
        versions=numbers,
        offer=st.integers(-1, 9),
        loss=st.none() | share,
        stopped=st.booleans(),
    ),
    st.builds(Heartbeat, clock=clock),
    st.builds(
        Contribution,
        clock=clock,
        round=number,
        attempt=number,
        fragment=number,
        base=number,
        t=number,
        steps=number,
        tokens=number,
        digest=text,
        probe=st.booleans(),
    ),
    st.builds(Decline, clock=clock, round=number, attempt=number, reason=text),
    st.builds(Leave, clock=clock, reason=text),
)
from_syncer: st.SearchStrategy[FromSyncer] = st.one_of(
    st.builds(
        Welcome,
        clock=clock,
        run=text,
        term=number,
        incarnation=number,
        settings=st.just(Settings()),
        fingerprint=text,
        versions=numbers,
        gathering=number,
        upload=st.booleans(),
        progress=share,
    ),
    st.builds(Refused, clock=clock, reason=text, final=st.booleans()),
    st.builds(Started, clock=clock, uploader=text, gathering=number),
    st.builds(Pull, clock=clock, round=number, attempt=number, fragment=number, gathering=number, deadline_s=share),
    st.builds(
        Announce,
        clock=clock,
        round=number,
        fragment=number,
        version=number,
        members=st.lists(st.builds(Member, text, number, number), max_size=3).map(tuple),
        gathering=number,
        digest=text,
    ),
    st.builds(Ending, clock=clock, reason=text),
    st.builds(Finish, clock=clock, reason=text, versions=numbers),
)


@given(from_learner)
def test_a_learners_message_survives_the_wire(message: FromLearner) -> None:
    assert decode_from_learner(encode(message)) == message


@given(from_syncer)
def test_the_syncers_message_survives_the_wire(message: FromSyncer) -> None:
    assert decode_from_syncer(encode(message)) == message


def complaint(decode: Callable[[bytes], object], data: bytes) -> str:
    try:
        decode(data)
    except PeerError as error:
        return str(error)
    return ""


@given(st.binary(max_size=200))
def test_random_bytes_are_a_peer_error_or_a_message(data: bytes) -> None:
    for decode in (decode_from_learner, decode_from_syncer, decode_score):
        assert "\n" not in complaint(decode, data)


@given(from_learner, st.integers(0, 2000), st.binary(min_size=1, max_size=4))
def test_damaged_messages_are_a_peer_error_or_a_message(message: FromLearner, at: int, damage: bytes) -> None:
    data = bytearray(encode(message))
    data[at % len(data) : at % len(data) + len(damage)] = damage
    for decode in (decode_from_learner, decode_from_syncer):
        assert "\n" not in complaint(decode, bytes(data))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"type": "Heartbeat", "clock": {}, "mood": 1}, "unknown field `mood`"),
        ({"type": "Pickle", "clock": {}}, "Invalid value 'Pickle'"),
        ({"type": "Leave", "reason": 5}, "Expected `str`, got `int`"),
        ({"type": "Leave"}, "missing required field `reason`"),
        ({"clock": {}}, "type"),
        ([1, 2], "Expected `object`, got `array`"),
    ],
)
def test_what_is_wrong_with_a_message_is_named(fields: object, says: str) -> None:
    with pytest.raises(PeerError, match=says):
        decode_from_learner(msgspec.msgpack.encode(fields))


def test_settings_that_cannot_be_are_a_peer_error() -> None:
    good = msgspec.to_builtins(
        Welcome(run="r", term=1, incarnation=1, settings=Settings(), fingerprint="", versions=(), gathering=0)
    )
    good["settings"]["learners"] = 0
    with pytest.raises(PeerError, match="learners = 0"):
        decode_from_syncer(msgspec.msgpack.encode(good))


def test_deep_nesting_is_a_peer_error() -> None:
    with pytest.raises(PeerError):
        decode_from_learner(b"\x81\xa5clock" + b"\x91" * 100_000)


@pytest.mark.parametrize("version", [0, OLDEST - 1, PROTOCOL + 1])
def test_another_protocol_is_refused_with_the_fix(version: int) -> None:
    with pytest.raises(PeerError) as caught:
        check_hello(Hello(protocol=version, learner="a", session="s"))
    assert str(caught.value) == (
        f"this syncer speaks protocol 2, the learner speaks {version}: install the same version of atoll on both"
    )


@pytest.mark.parametrize("name", ["t", "steps", "tokens", "total", "position", "base", "round", "incarnation"])
@pytest.mark.parametrize("value", [2**48, -(2**48), 2**63 - 1, -(2**63)])
def test_no_integer_of_a_learner_passes_what_a_sum_can_hold(name: str, value: int) -> None:
    given = {"round": 1, "attempt": 1, "fragment": 0, "base": 0, "t": 1, "steps": 1, "tokens": 1, "digest": ""}
    with pytest.raises(PeerError, match=rf"could not be read: Expected `int` [<>]= .*{name}"):
        decode_from_learner(encode(Contribution(**{**given, name: value})))


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "-x", "a/b", "../x", "a b", "x" * 65, "é", "a\n"])
def test_names_that_are_no_names_are_refused(name: str) -> None:
    with pytest.raises(PeerError, match="is no name"):
        check_hello(Hello(protocol=PROTOCOL, learner=name, session="s"))
    with pytest.raises(PeerError, match="is no name"):
        check_hello(Hello(protocol=PROTOCOL, learner="a", session=name))


def test_the_digest_is_the_same_for_every_kind_of_buffer() -> None:
    assert (
        compute_digest(b"abc")
        == compute_digest(bytearray(b"abc"))
        == compute_digest(memoryview(b"abc"))
        == "06b05ab6733a618578af5f94892f3950"
    )


def test_limits_are_above_zero() -> None:
    with pytest.raises(ConfigError, match="hello_s = 0"):
        FabricLimits(hello_s=0)


@pytest.mark.parametrize("header", ["2", "2-2", "1-2", "2-3", "0-999999999"])
def test_a_syncer_with_a_version_in_common_is_accepted(header: str) -> None:
    check_syncer_version(header)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        *((header, "names no version") for header in (None, "", "x", "2-", "9" * 5000)),
        *((header, f"speaks {header}") for header in ("1", "0-1", "3", "3-17")),
    ],
)
def test_a_syncer_of_another_version_is_refused_with_the_fix(header: str | None, says: str) -> None:
    with pytest.raises(PeerError) as caught:
        check_syncer_version(header)
    assert str(caught.value) == (
        f"this learner speaks protocol 2, the syncer {says}: install the same version of atoll on both"
    )


def test_what_is_at_its_default_is_not_sent() -> None:
    assert msgspec.msgpack.decode(encode(Heartbeat())) == {"type": "Heartbeat"}


def test_a_refused_name_is_told_in_one_line_whatever_is_in_it() -> None:
    with pytest.raises(PeerError) as caught:
        check_hello(Hello(protocol=PROTOCOL, learner="\U000e0001\x1b\u2028" * 64, session="s"))
    assert len(str(caught.value)) <= 300 and str(caught.value).isprintable()


def test_no_learner_takes_the_syncers_name() -> None:
    with pytest.raises(PeerError, match="the syncer's own name"):
        check_hello(Hello(protocol=PROTOCOL, learner="syncer", session="s"))


@pytest.mark.parametrize("counter", ["t", "incarnation", "term"])
@pytest.mark.parametrize("count", [-1, 2**48, 2**63 - 1])
def test_a_hello_with_counters_that_no_run_reaches_is_refused(counter: str, count: int) -> None:
    with pytest.raises(PeerError, match=f"{counter} = {count} is no count"):
        check_hello(Hello(protocol=PROTOCOL, learner="a", session="s", **{counter: count}))


def test_only_a_hello_may_be_large() -> None:
    tensors = tuple(TensorSpec(f"blocks.{n}.mlp.weight", (1024, 4096), "float32") for n in range(40_000))
    hello = Hello(protocol=PROTOCOL, learner="a", session="s", tensors=tensors)
    assert decode_from_learner(encode(hello)) == hello
    with pytest.raises(PeerError, match=r"no other message has 20971.. bytes"):
        decode_from_learner(encode(Leave(reason="x" * 2**21)))


@pytest.mark.parametrize(
    "message",
    [
        Heartbeat(clock={str(n): n for n in range(20_000)}),
        Hello(protocol=PROTOCOL, learner="a", session="s", versions=(0,) * 70_000),
        Hello(protocol=PROTOCOL, learner="a", session="s", tensors=(TensorSpec("a" * 2000, (1,), "float32"),)),
        Hello(protocol=PROTOCOL, learner="a", session="s", tensors=(TensorSpec("a", (1,) * 100, "float32"),)),
        Hello(protocol=PROTOCOL, learner="a", session="s", data="x" * 1001),
        Hello(protocol=PROTOCOL, learner="a", session="s", ranks=((),) * 4097),
        Hello(protocol=PROTOCOL, learner="a", session="s", ranks=((Box("a" * 1025, (0,), (1,)),),)),
        Hello(protocol=PROTOCOL, learner="a", session="s", ranks=((Box("a", (0,) * 65, (1,)),),)),
        Heartbeat(clock={"x" * 65: 1}),
        Register(datasets=(("x" * 1001, 1, 1.0),), epochs=1, batch=1),
        Progress(t=0, steps=(), tokens=(), versions=(), tape=(BeganEntry(0, 1, "x" * 1001, "", "", True),)),
    ],
)
def test_what_may_be_long_has_a_bound(message: FromLearner) -> None:
    with pytest.raises(PeerError, match="of length <="):
        decode_from_learner(encode(message))


def test_of_what_a_model_wrote_a_screen_is_kept() -> None:
    said = msgspec.json.encode(ScoreReport(round=1, loss=1.0, cpu_s=0.0, sample="ünï" * 5000, final=True))
    kept = decode_score(said)
    assert len(kept.sample) == SAMPLE_CHARS and kept.sample.startswith("ünïünï") and kept.final
    with pytest.raises(PeerError, match="of length <="):
        decode_score(msgspec.json.encode({"round": 1, "loss": 1.0, "cpu_s": 0.0, "sample": "x" * 70_000}))


def test_a_line_steers_no_terminal() -> None:
    assert one_line("red \x1b[31m\u202e\ud800\n\tand more") == "red \ufffd[31m\ufffd\ufffd and more"
    assert len(one_line("x y" * 10**6)) == 300
