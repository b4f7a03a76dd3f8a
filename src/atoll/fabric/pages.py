"""What people look at, on the syncer's own port. The fabric knows only that there is such a thing: it is handed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from aiohttp import web


class Pages(Protocol):
    """They only read: nothing a browser sends changes anything."""

    @property
    def sockets(self) -> frozenset[str]:
        """Paths of WebSockets that web pages may open. Whoever serves them looks at the origin."""
        ...

    def routes(self) -> Sequence[web.RouteDef]: ...

    def sweep(self, gone: Callable[[str, str], str]) -> None:
        """Send away whoever is looking by a token that counts no more; `gone` says why, or nothing."""
        ...

    def close(self) -> None:
        """Send everybody away who is looking: the port closes."""
        ...
