"""Messages to bytes and back, and the hard limits on what a peer may send.

Rules:
- a peer of a version that is not understood any more is refused with one line that says what to do;
- control messages are msgpack, typed and tagged; what does not fit its type is a PeerError of one line, never a guess;
- a message of a learner is read within 50 ms, whatever it is: only a hello, which names every tensor, may be large;
- every number in `FabricLimits` is a bound on memory or time that a peer can cost us; nothing a peer does gets past it;
- a name that a peer brings (learner, session) is one that may be part of a path (protocol/limits.py).
"""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from atoll.digests import Buffer, compute_digest
from atoll.protocol.clock import SYNCER
from atoll.protocol.errors import AtollError, ConfigError, PeerError
from atoll.protocol.limits import ALLOWED, MAX_COUNTER, Count, Direction, Name, Real, Seconds, clipped, is_name
from atoll.protocol.messages import OLDEST, PROTOCOL, FromLearner, FromSyncer, Hello

KIB = 1024
MIB = 1024 * KIB

SMALL_BYTES = 64 * KIB
"""Work on more bytes than this (to copy, hash, encode, decode) is done in a thread, never on an event loop."""

SESSION_HEADER = "Atoll-Session"
DIGEST_HEADER = "Atoll-Digest"
VERSION_HEADER = "Atoll-Version"
ROUND_HEADER = "Atoll-Round"
STEPS_HEADER = "Atoll-Steps"
"""The digests of encoded steps, the oldest first, with commas; then they are the body, one behind the other."""
CODEC_HEADER = "Atoll-Codec"
"""Form of a version 0 that is sent in 2 bytes a value (numerics/initial.py); its digest is that of the body."""
BF16 = "bf16"
"""Name of that form."""
LOSS_HEADER = "Atoll-Loss"
"""Header of a body of version 0: relative error of the rounded parameters, in parts per billion, as its sender measured
it."""
PROTOCOL_HEADER = "Atoll-Protocol"
"""In the answer that opens a control channel: the oldest and the newest version that the syncer understands, `2-3`; or
the only one."""
RECEIVED_HEADER = "Atoll-Received"
"""Header of the answer to a body: seconds from its first byte to its last; 0: it came in one piece."""
RELAY_HEADER = "Atoll-Relay"
"""Of what comes through a relay: its session. In the answer that opens a channel: this is a relay, of that name."""

SAME = "install the same version of atoll on both"

SAMPLE_CHARS = 4000
"""Of what a model wrote are kept."""

_LINE_CHARS = 300
_MESSAGE_BYTES = 1 * MIB
"""Largest message of a learner that is no hello."""

T = TypeVar("T")


class FabricLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one peer, or all of them, may cost in bytes and seconds."""

    control_bytes: int = 4 * MIB
    """Largest control message; a hello with 40,000 tensors fits."""
    score_bytes: int = 64 * KIB
    """Largest score of an evaluator, or settings of an operator."""
    score_rate: int = 1 * KIB
    """Bytes of scores a second of one token, after `score_bytes` at once; more is refused: a score is some 80 bytes."""
    connections: int = 4096
    """Open at once, of all peers together; more are closed unread. A learner may have 17, an idle one costs 10 KiB."""
    address_connections: int = 3072
    """The same, of one address: a whole site may be behind one."""
    token_connections: int = 2048
    """The same, of one token: fewer than of an address, so that it cannot keep its neighbours out."""
    viewer_connections: int = 128
    """The same, of a viewer's token: the other places are learners'."""
    strangers: int = 512
    """Connections that have not said yet who they are."""
    messages_rate: float = 1000.0
    """Control messages a second of one learner, over a few seconds; a flood costs it the channel."""
    control_rate: int = 2 * MIB
    """The same in bytes."""
    hello_bytes: int = 32 * MIB
    """Hellos that are read at once, of one token at one address: eight of the largest, or a thousand others …
    Of those that have not come whole, as much of one token, and twice as much of all."""
    hello_rate: int = 1 * MIB
    """… and bytes of them a second after that; meanwhile it is told to come again later."""
    run_bytes: int = 65536 * MIB
    """Bodies of all learners being received at once, together."""
    sessions: int = 4096
    """Whose last sequence numbers are remembered, and folders whose last processes are; of more, those that were heard
    longest ago are forgotten."""
    send_queue: int = 1024
    """Messages waiting for one peer that reads slowly; one more closes its channel."""
    queue_bytes: int = 4 * MIB
    """The same in bytes."""
    learners: int = 1024
    """Open control channels; one more is refused."""
    budget_bytes: int = 4096 * MIB
    """Bodies of one learner being received at once, together."""
    hello_s: float = 5.0
    """From the opening of a control channel to its hello."""
    header_s: float = 5.0
    """From the opening of a connection to the end of its first request's headers; of each later one, from its first
    byte."""
    keepalive_s: float = 60.0
    """How long a connection may stay idle between two requests."""
    dial_s: float = 5.0
    """From the first packet to an open control channel."""
    ping_s: float = 6.0
    """A channel silent for this long is pinged; without an answer in half of it, it is lost (9 s in all)."""
    answer_s: float = 1.0
    """A learner whose name another process asks for has this long to answer a ping; then the name is the other's. A
    syncer sets it to its run's `heartbeat_s`."""
    send_s: float = 10.0
    """The longest wait for a peer to take one message, or one chunk of a body."""
    flush_s: float = 2.0
    """The longest a closing channel waits for what is queued."""
    body_grace_s: float = 5.0
    """A body may be as slow as it likes for this long …"""
    body_rate: int = 64 * KIB
    """… and must then have come at this many bytes per second on average, …"""
    body_idle_s: float = 10.0
    """… and never pause for longer than this."""
    chunk_bytes: int = 512 * KIB
    """Bodies are sent in pieces of this size, …"""
    tls_chunk_bytes: int = 64 * KIB
    """… and by a syncer, over TLS, in pieces of this size: TLS keeps them twice while they are not taken."""
    answer_bytes: int = 128 * MIB
    """Large answers (status, metrics) that are not taken yet; half of it for a token that is alone."""
    backoff_s: float = 0.1
    """The first wait before a lost syncer is dialled again; it doubles …"""
    backoff_cap_s: float = 1.0
    """… up to this, and is drawn evenly between 0 and that."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name)} must be above 0")


METRICS = 32
"""Figures of a score beside the loss, at most."""


class ScoreReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What an evaluator found out about the global model as of one round. Defaults are left out, so that a syncer of an
    earlier version reads a plain loss."""

    round: Count
    loss: Real | None
    """None: what the scorer gave is not a number, or beyond all measure."""
    cpu_s: Seconds
    sample: Annotated[str, Meta(max_length=64 * KIB)] = ""
    """What the model wrote: as much of it is kept as a screen shows."""
    final: bool = False
    metrics: Annotated[dict[Name, Real | None], Meta(max_length=METRICS)] = {}
    """Other figures of the scorer, by name; None: not a number, or beyond all measure."""
    directions: Annotated[dict[Name, Direction], Meta(max_length=METRICS)] = {}
    """Of those metrics for which it was declared: whether a smaller or a larger value is better."""
    unit: Name = ""
    """Of the loss, in the script's own words."""
    has_loss: bool = True
    """False: the scorer gives metrics only, and nothing follows from them."""


_encoder = msgspec.msgpack.Encoder()
_from_learner: msgspec.msgpack.Decoder[FromLearner] = msgspec.msgpack.Decoder(FromLearner)
_hello: msgspec.msgpack.Decoder[FromLearner] = msgspec.msgpack.Decoder(Hello)
_from_syncer: msgspec.msgpack.Decoder[FromSyncer] = msgspec.msgpack.Decoder(FromSyncer)
_score: msgspec.json.Decoder[ScoreReport] = msgspec.json.Decoder(ScoreReport)
_words: msgspec.json.Decoder[list[str]] = msgspec.json.Decoder(list[str])


def encode(message: FromLearner | FromSyncer) -> bytes:
    return _encoder.encode(message)


def decode_from_learner(data: Buffer) -> FromLearner:
    if len(data) > _MESSAGE_BYTES:
        return _decoded(_hello, data, f"a hello (no other message has {len(data)} bytes)")
    return _decoded(_from_learner, data, "a learner's message")


def decode_from_syncer(data: Buffer) -> FromSyncer:
    return _decoded(_from_syncer, data, "the syncer's message")


def decode_score(data: Buffer) -> ScoreReport:
    score = _decoded(_score, data, "a score")
    return msgspec.structs.replace(score, sample=clipped(score.sample, SAMPLE_CHARS))


def decode_words(data: Buffer) -> list[str]:
    """Settings as an operator writes them, key=value."""
    return _decoded(_words, data, "settings")


def check_hello(message: FromLearner) -> Hello:
    """The message, if it may open a channel."""
    if not isinstance(message, Hello):
        raise PeerError(f"the first message was {type(message).__name__}: a channel opens with Hello")
    if not OLDEST <= message.protocol <= PROTOCOL:
        raise PeerError(f"this syncer speaks protocol {PROTOCOL}, the learner speaks {message.protocol}: {SAME}")
    for what, name in (("learner", message.learner), ("session", message.session)):
        if not is_name(name):
            raise PeerError(f"{what} = '{one_line(name[:64])}' is no name: {ALLOWED}")
    if message.learner == SYNCER:
        raise PeerError(f"learner = '{SYNCER}' is the syncer's own name: choose another")
    counts = (("t", message.t), ("incarnation", message.incarnation), ("term", message.term))
    for what, count in (*counts, ("tokens_total", message.tokens_total)):
        if not 0 <= count < MAX_COUNTER:
            raise PeerError(f"{what} = {count} is no count that a run reaches")
    return message


def check_syncer_version(header: str | None) -> None:
    """PeerError if the syncer that sent this header and this learner have no version in common."""
    named = re.fullmatch(r"(?:([0-9]{1,9})-)?([0-9]{1,9})", header or "")
    if named is None:
        raise PeerError(f"this learner speaks protocol {PROTOCOL}, the syncer names no version: {SAME}")
    if int(named[2]) < OLDEST or int(named[1] or named[2]) > PROTOCOL:
        raise PeerError(f"this learner speaks protocol {PROTOCOL}, the syncer speaks {named[0]}: {SAME}")


async def digest_aside(data: memoryview) -> str:
    """The digest, on a thread where it would hold up the event loop."""
    return compute_digest(data) if data.nbytes <= SMALL_BYTES else await asyncio.to_thread(compute_digest, data)


def one_line(text: object) -> str:
    """Safe to log, to send and to show: one line of at most 300 characters, none of which steers a terminal."""
    line = " ".join(str(text)[: 4 * _LINE_CHARS].split())[:_LINE_CHARS]
    return line if line.isprintable() else "".join(char if char.isprintable() else "\ufffd" for char in line)


def _decoded(decoder: msgspec.msgpack.Decoder[T] | msgspec.json.Decoder[T], data: Buffer, what: str) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, AtollError, ValueError, OverflowError, RecursionError) as error:
        raise PeerError(one_line(f"{what} could not be read: {error}")) from None
