"""A port that takes bodies in and gives fragments out: of a syncer (`server`), or of a shard of it (`shard_server`)."""

from __future__ import annotations

import re
from collections.abc import Collection

from aiohttp import web

from atoll.fabric.authorizer import Authorizer, Rejected
from atoll.fabric.handlers import ServedFragment
from atoll.fabric.host import Port, send_pieces
from atoll.fabric.intake import Intake, Uploads
from atoll.fabric.listener import Tls
from atoll.fabric.wire import (
    BF16,
    CODEC_HEADER,
    DIGEST_HEADER,
    LOSS_HEADER,
    ROUND_HEADER,
    STEPS_HEADER,
    VERSION_HEADER,
    FabricLimits,
)

_NUMBER = "[0-9]{1,12}"


class BodyPort(Port):
    def __init__(
        self,
        host: str,
        port: int,
        limits: FabricLimits,
        *,
        authorizer: Authorizer | None = None,
        tls: Tls | None = None,
        names: Collection[str] = (),
    ) -> None:
        super().__init__(host, port, limits, authorizer=authorizer, tls=tls, names=names)
        self._intake = Intake(self._limits)
        self._uploads = Uploads()
        self._bodies_out = 0

    async def _serve(self, request: web.Request, served: ServedFragment, start: int) -> web.StreamResponse:
        response = web.StreamResponse(
            status=206 if start else 200,
            headers={
                VERSION_HEADER: str(served.version),
                ROUND_HEADER: str(served.round),
                DIGEST_HEADER: served.digest,
                "Content-Type": "application/octet-stream",
            },
        )
        if start:
            response.headers["Content-Range"] = f"bytes {start}-{served.data.nbytes - 1}/{served.data.nbytes}"
        if served.codec:
            response.headers[CODEC_HEADER] = served.codec
        if served.steps:
            response.headers[STEPS_HEADER] = ",".join(digest for digest, _ in served.steps)
        if request.transport is not None:
            served.on_cut(request.transport.abort)
        parts = [served.data.cast("B")[start:]] if start else [part.cast("B") for part in served.body]
        await send_pieces(request, response, parts, self._limits, self._count_out)
        return response  # one that is too slow, or cut off, goes on later, or fetches a newer version

    def _count_out(self, size: int) -> None:
        self._bodies_out += size


def rank_of(request: web.Request) -> int:
    """Whose part of a body is sent or asked for; 0 also for a plain learner."""
    rank = request.query.get("rank", "0")
    if not re.fullmatch(_NUMBER, rank, re.ASCII):
        raise Rejected(400, "rank is no rank: it is a number of up to 12 digits")
    return int(rank)


def codec_of(request: web.Request) -> str:
    """Return the form in which version 0 is sent or asked for; empty: fp32."""
    codec = request.query.get("codec", "")
    if codec not in ("", BF16):
        raise Rejected(400, f"codec is no form of version 0: it is {BF16}, or left out for fp32")
    return codec


def loss_of(request: web.Request) -> float:
    """Return the relative error that came with a body of version 0; 0: the request names none."""
    loss = request.headers.get(LOSS_HEADER, "")
    return int(loss) / 1e9 if re.fullmatch(_NUMBER, loss, re.ASCII) else 0.0


def resumed_at(request: web.Request, served: ServedFragment, start: int) -> int:
    """The byte that a reader goes on from; 0: what it has is of another version, and it gets this one whole."""
    if not start:
        return 0
    version, size = request.headers.get(VERSION_HEADER, ""), served.data.nbytes
    if "have" in request.query or not re.fullmatch(_NUMBER, version, re.ASCII):
        raise Rejected(400, f"a range is of a whole version, which {VERSION_HEADER} and {DIGEST_HEADER} name")
    if (int(version), request.headers.get(DIGEST_HEADER)) != (served.version, served.digest):
        return 0
    if start >= size:
        raise Rejected(416, f"the version has {size} bytes: there is no byte {start}")
    return start
