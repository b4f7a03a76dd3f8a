"""Requests of one connection, read one at a time.

aiohttp reads up to 32 requests ahead of the one that it answers, and bounds their headers by lines only: each may have
a megabyte. Nobody who means well sends a request before the last one was answered. So here:

- the headers of a request have `HEAD_BYTES` in all, and `header_s` from their first byte to their last;
- what comes behind a request waits as it came, until that one is answered: `HEAD_BYTES` of it;
- whoever writes to it waits until all of it is sent, so that answers do not pile up;
- a connection that brings more is closed. So is one that makes a mistake in HTTP, asks for a tunnel, or names no length
  for a body: it is told so, and nothing more of it is read;
- the same when a request names a length and aiohttp expects no body: it would read requests out of those bytes;
- a body may be read straight into a buffer (`body_reader`); what is not read of it is dropped as it comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import signature
from typing import Any

from aiohttp import web
from aiohttp.http import HttpRequestParser, RawRequestMessage, WebSocketReader
from aiohttp.streams import StreamReader
from aiohttp.web_request import BaseRequest

from atoll.fabric.body_reader import BodyReader
from atoll.fabric.calls import as_unreachable, copy_early
from atoll.fabric.wire import KIB
from atoll.protocol.errors import Unreachable

HEAD_BYTES = 16 * KIB
END = b"\r\n\r\n"
TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"

PARSED_BY = {
    name: parameter.default
    for name, parameter in signature(web.RequestHandler.__init__).parameters.items()
    if name in ("read_bufsize", "max_line_size", "max_field_size", "max_headers", "auto_decompress")
}
"""What aiohttp's connections hand to their parsers, with its defaults. Not every version of it has all."""


class RequestReader(web.RequestHandler):
    def __init__(self, server: web.Server, header_s: float, **how: Any) -> None:
        super().__init__(server, **how)
        self._how = {name: how.get(name, default) for name, default in PARSED_BY.items()}
        self._header_s = header_s
        self._ahead = b""
        """Has come, and is not read yet."""
        self._head = b""
        """Of the headers that have not come whole."""
        self._body_left = 0
        self._taken: StreamReader | None = None
        """The body, where it is not read by aiohttp."""
        self._answering = self._deaf = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A drain is over once everything is sent. (TLS keeps a copy of what is under way; its transport, told to wait
        for less than one byte, would wait for ever.)"""
        assert isinstance(transport, asyncio.WriteTransport)
        if transport.get_extra_info("sslcontext") is None:
            transport.set_write_buffer_limits(0)
        else:
            transport.set_write_buffer_limits(high=1, low=0)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if not data or self._payload_parser is not None or len(data) <= self._body_left:
            self._pass_on(data)  # aiohttp looks again at what it has, frames of a WebSocket, or a body
            return
        self._ahead += data
        self._read_ahead()

    def _read_ahead(self) -> None:
        while self._ahead and not self._deaf:
            if self._body_left:
                self._hand_on(self._body_left)
            elif not self._answering:
                self._read_head()
            else:
                break
        if len(self._ahead) > HEAD_BYTES:
            self._hang_up()

    def _hand_on(self, size: int) -> bytes:
        read, self._ahead = self._ahead[:size], self._ahead[size:]
        self._pass_on(read)
        return read

    def _pass_on(self, data: bytes) -> None:
        if self._body_left and self._taken is not None:
            self._count_taken(len(data))
            return
        self._body_left -= min(len(data), self._body_left)
        super().data_received(data)

    async def read_body(self, body: StreamReader, into: memoryview, came: Callable[[int], None]) -> None:
        """The body of the request that is being answered, into a buffer of its length; `came` is told the size of every
        piece. Unreachable: the connection is lost."""
        left = copy_early(body, into, came)
        if not left:
            return
        if left.nbytes != self._body_left:
            assert self._close or self._force_close  # then aiohttp drops what comes
            raise Unreachable("a part of the body was dropped: the port is being closed")

        def count(size: int) -> None:
            self._count_taken(size)
            came(size)

        reader = BodyReader(self.transport, left, count)
        self._taken, self._parser = body, self._make_parser()
        try:
            with as_unreachable():
                await body.wait_eof()  # or aiohttp ends it: with the connection, or when the port is being closed
        finally:
            reader.give_back()

    def _count_taken(self, size: int) -> None:
        assert self._taken is not None
        self._body_left -= size
        if not self._body_left:
            self._taken.feed_eof()

    def _make_parser(self) -> HttpRequestParser:
        """As aiohttp makes its own, for the requests behind a body that the last one has not seen."""
        limits = {name: value for name, value in self._how.items() if name != "read_bufsize"}
        size = self._how["read_bufsize"]
        return HttpRequestParser(self, self._loop, size, payload_exception=web.RequestPayloadError, **limits)

    def _read_head(self) -> None:
        """The headers as far as they have come, and nothing behind them."""
        known = len(self._head)
        end = (self._head + self._ahead).find(END, max(0, known - len(END) + 1))
        size = HEAD_BYTES - known if end < 0 else end + len(END) - known
        if known + min(size, len(self._ahead)) >= HEAD_BYTES:
            self._hang_up(TOO_LONG)
            return
        before = self._request_count
        self._head += self._hand_on(size)
        if self._request_count > before:
            self._begin_request(*self._messages[-1])
        elif end >= 0:
            self._head = b""  # empty lines before a request
        elif self._timer is None:
            self._timer = self._loop.call_later(self._header_s, self._hang_up)

    def _begin_request(self, message: object, payload: StreamReader) -> None:
        self._head, self._answering, self._taken = b"", True, None
        self._stop_timer()
        if not isinstance(message, RawRequestMessage) or message.chunked or message.method == "CONNECT":
            self._read_no_more()
            return
        self._body_left = int(message.headers.get("Content-Length", 0))
        if self._body_left and payload.is_eof():
            self._read_no_more()  # aiohttp would take the body for requests

    def _read_no_more(self) -> None:
        """This request is answered; then the connection is closed."""
        self._deaf, self._ahead, self._body_left = True, b"", 0
        self.close()

    async def finish_response(
        self, request: BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        done = await super().finish_response(request, resp, start_time)
        self._answering = False
        self._read_ahead()
        return done

    def set_parser(self, parser: WebSocketReader, *args: Any, **how: Any) -> None:
        """From here on it is a WebSocket, which has limits of its own."""
        super().set_parser(parser, *args, **how)
        early, self._ahead = self._ahead, b""
        if early:
            super().data_received(early)

    def connection_lost(self, error: BaseException | None) -> None:
        self._stop_timer()
        self._ahead = self._head = b""
        super().connection_lost(error)

    def _hang_up(self, why: bytes = b"") -> None:
        self._deaf, self._ahead = True, b""
        self._stop_timer()
        if self.transport is None:
            return
        if why:
            self.transport.write(why)
            self.transport.close()
        else:
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
