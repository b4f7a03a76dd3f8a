"""Connections that no honest peer opens: spoilt HTTP requests, WebSocket handshakes and frames, seeded.

Each is the bytes of one connection, in the pieces it sends them. Frames are made by hand, so that they can be wrong in
ways that no library sends: unknown opcodes, no mask, reserved bits, lengths of 2⁶³, fragments without an end, control
frames that are too long or in parts, a close with half a code.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator

import msgspec
from tests.fabric.fuzz import HEADERS, NAMES, Fuzz

from atoll.protocol.messages import PROTOCOL, Hello

Pieces = list[bytes]

TICKET = "0" * 32
REQUESTS = (
    b"GET /v1/status HTTP/1.1\r\nHost: [::1]\r\n\r\n",
    b"GET /v1/manifest HTTP/1.1\r\nHost: [::1]\r\nConnection: keep-alive\r\n\r\n",
    b"GET /v1/fragments/0 HTTP/1.1\r\nHost: [::1]\r\nRange: bytes=0-\r\n\r\n",
    b"GET /v1/fragments/0 HTTP/1.1\r\nHost: [::1]\r\nRange: bytes=4-\r\nAtoll-Version: 3\r\nAtoll-Digest: 0\r\n\r\n",
    b"GET /v1/relay/"
    + TICKET.encode()
    + b" HTTP/1.1\r\nHost: [::1]\r\nAtoll-Learner: honest\r\nAtoll-Session: s\r\n\r\n",
    b"PUT /v1/relay/"
    + TICKET.encode()
    + b" HTTP/1.1\r\nHost: [::1]\r\nAtoll-Offset: 0\r\nContent-Length: 4\r\n\r\nbody",
    b"PUT /v1/contributions/honest/0/1 HTTP/1.1\r\nHost: [::1]\r\nAtoll-Session: s\r\nContent-Length: 4\r\n\r\nbody",
    b"PUT /v1/initial/honest/0 HTTP/1.1\r\nHost: [::1]\r\nAtoll-Digest: 0\r\nContent-Length: 4\r\n\r\nbody",
    b'POST /v1/scores HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 34\r\n\r\n{"round": 1, "loss": 2, "cpu_s": 0}',
    b'POST /v1/settings HTTP/1.1\r\nHost: [::1]\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n["a"]\r\n0\r\n\r\n',
)
UPGRADE = (
    b"GET /v1/control HTTP/1.1\r\nHost: [::1]\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
LINES = (
    *(b"Content-Length: -1", b"Content-Length: 99999999999999999999", b"Content-Length: 4, 5", b"Content-Length: 1_0"),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Expect: 100-continue", b"Expect: tea"),
    *(b"Content-Encoding: gzip", b"Content-Encoding: br", b"Range: bytes=-5", b"Range: bytes=9" + b"9" * 40 + b"-"),
    *(b"Range: bytes=4-", b"Range: bytes=999999999999999-", b"Atoll-Version: -1", b"Atoll-Version: " + b"9" * 40),
    *(
        b"Upgrade: h2c",
        b"Upgrade: websocket",
        b"Connection: close, keep-alive",
        b"Origin: http://evil",
        b": empty",
        b"x",
    ),
    *(
        b"Cookie: " + b"a=b; " * 500,
        b"X: " + b"y" * 9000,
        b"X: \x00",
        b" folded",
        b"Host: a\r\nHost: b",
        b"X: \xff\xfe",
    ),
    *(b"Sec-WebSocket-Extensions: permessage-deflate; server_max_window_bits=99", b"Sec-WebSocket-Version: -1"),
    *(b"Sec-WebSocket-Key: x", b"Sec-WebSocket-Protocol: " + b"a," * 400, b"Atoll-Session: " + b"\xf0\x9f\x8d\x8d"),
)
WORDS = (
    b"GET",
    b"get",
    b"POST",
    b"CONNECT",
    b"PRI",
    b"TRACE",
    b"OPTIONS",
    b"\x16\x03\x01",
    b"",
    b"G" * 9000,
    b"DELETE",
)
VERSIONS = (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"HTTP/1.1\x00", b"", b"http/1.1")


class Frames:
    """An endless stream of connections; the same seed gives the same."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self._fuzz = Fuzz(seed)
        self._hellos = 0
        self._messages = (given.data for given in self._fuzz.inputs(1 << 60) if given.kind == "learner")
        self._kinds: tuple[Callable[[], Pieces], ...] = (
            self._request,
            self._handshake,
            self._talk,
            self._talk,
            self._talk,
        )

    def connections(self, count: int) -> Iterator[Pieces]:
        for _ in range(count):
            yield self._pieces(b"".join(self.dice.choice(self._kinds)()))

    def _pieces(self, data: bytes) -> Pieces:
        """Mostly at once; sometimes byte by byte, or cut where it hurts."""
        if self.dice.random() < 0.8 or len(data) < 2:
            return [data]
        cuts = sorted(self.dice.randrange(len(data)) for _ in range(self.dice.choice((1, 2, 9))))
        return [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    # ---- HTTP ---------------------------------------------------------------------------------------------------

    def _request(self) -> Pieces:
        return [self._spoilt(self.dice.choice(REQUESTS)) for _ in range(self.dice.choice((1, 1, 1, 2, 20)))]

    def _handshake(self) -> Pieces:
        return [self._spoilt(UPGRADE), self._hello()]

    def _spoilt(self, request: bytes) -> bytes:
        dice = self.dice
        match dice.randrange(8):
            case 0:
                return self._fuzz._flip(request)
            case 1:
                return self._fuzz._cut(request)
            case 2:
                return request.replace(b"\r\n", dice.choice((b"\n", b"\r", b"\r\r\n", b"\x00\r\n")))
            case 3:
                _, _, rest = request.partition(b" ")
                return dice.choice(WORDS) + b" " + rest
            case 4:
                first, _, rest = request.partition(b"\r\n")
                return first.rpartition(b" ")[0] + b" " + dice.choice(VERSIONS) + b"\r\n" + rest
            case 5:
                _, _, rest = request.partition(b" HTTP")
                path = dice.choice(
                    (*NAMES, "/v1/fragments/" + "9" * 400, "*", "http://[::1", "/%00", "/v1/../v1/status")
                )
                return b"GET " + path.encode() + b" HTTP" + rest
            case 6:
                return dice.randbytes(dice.choice((1, 20, 3000)))
        first, _, rest = request.partition(b"\r\n")
        return b"\r\n".join((first, *dice.sample(LINES, dice.choice((1, 1, 3))), rest))

    # ---- WebSocket ----------------------------------------------------------------------------------------------

    def _talk(self) -> Pieces:
        """A good handshake, mostly a good hello, then frames that are none, or carry what is no message."""
        dice, said = self.dice, [UPGRADE]
        if dice.random() < 0.7:
            said.append(self._hello())
        return [*said, *(self._frame() for _ in range(dice.choice((1, 1, 2, 12))))]

    def _hello(self) -> bytes:
        """Numbered, of a name and session of its own: it opens a channel, so that what follows is heard there."""
        self._hellos += 1
        hello = Hello(protocol=PROTOCOL, learner=f"fuzz-{self._hellos}", session="s", seq=1)
        return frame(2, msgspec.msgpack.encode(hello))

    def _frame(self) -> bytes:
        dice, message = self.dice, next(self._messages)
        match dice.randrange(12):
            case 0:
                return frame(dice.choice((3, 4, 7, 11, 12, 15)), message[:100])
            case 1:
                return frame(2, message, masked=False)
            case 2:
                return frame(2, message, reserved=dice.choice((1, 2, 4, 7)))
            case 3:
                return frame(
                    dice.choice((1, 2, 8, 9)), message[:40], claims=dice.choice((2**63, 2**64 - 1, 2**31, 5 << 20))
                )
            case 4:
                return b"".join(
                    frame(0 if part else 2, message[:50], final=False) for part in range(dice.choice((1, 40)))
                )
            case 5:
                return frame(0, message[:50])
            case 6:
                return frame(dice.choice((8, 9, 10)), bytes(dice.choice((126, 200, 70_000))))
            case 7:
                return frame(dice.choice((8, 9, 10)), b"", final=False)
            case 8:
                return frame(8, dice.choice((b"", b"\x03", b"\x03\xe8", b"\x00\x00", b"\xff\xff", b"\x03\xe8\xff\xfe")))
            case 9:
                return frame(1, dice.choice((b"text", b"\xff\xfe", b"\xed\xa0\x80", message)))
            case 10:
                return self._fuzz._flip(frame(2, message)) if dice.random() < 0.5 else dice.choice(HEADERS)
        return frame(2, message)


def frame(
    opcode: int, data: bytes, *, final: bool = True, masked: bool = True, reserved: int = 0, claims: int | None = None
) -> bytes:
    """`claims`: a length that it says, whatever comes."""
    size = len(data) if claims is None else claims
    head = bytes([final << 7 | reserved << 4 | opcode])
    bit = masked << 7
    if size < 126:
        head += bytes([bit | size])
    elif size < 2**16:
        head += struct.pack(">BH", bit | 126, size)
    else:
        head += struct.pack(">BQ", bit | 127, size)
    return head + (b"\0\0\0\0" if masked else b"") + data  # a mask of zeros leaves it as it is
