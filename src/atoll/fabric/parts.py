"""What is done with all shards of a syncer at once (docs/adr/0031), and versions that come in parts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from atoll.protocol.errors import Unreachable

T = TypeVar("T")
ANY = -1
AGAIN_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Waits before an older part is fetched again: a shard commits a moment after the lead."""


async def run_together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What each returns. The first error is raised once all have ended: nothing goes on writing into a buffer then."""
    if len(work) == 1:  # without a task of its own
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [one.result() for one in running]


async def fetch_one_version(parts: Sequence[Callable[[int], Coroutine[Any, Any, int]]], tries: int = 60) -> int:
    """Fetch every part, and those that are older than the others again, until all are of one version; which it is.
    Each is given the version that the others have, and returns its own. Unreachable: some stayed behind."""
    versions = await run_together([fetch(ANY) for fetch in parts])
    for number in range(tries):
        newest = max(versions)
        behind = [n for n, version in enumerate(versions) if version < newest]
        if not behind:
            return newest
        await asyncio.sleep(AGAIN_S[min(number, len(AGAIN_S) - 1)])
        for n, version in zip(behind, await run_together([parts[n](newest) for n in behind]), strict=True):
            versions[n] = version
    raise Unreachable(f"its parts are of versions {min(versions)} to {max(versions)}")


async def keep_asking(
    ask: Callable[[], Awaitable[T]], goes_on: Callable[[], bool], tell_away: Callable[[str], None]
) -> T:
    """What a shard answers, once it does. It is asked again for as long as `goes_on`; each failure is told."""
    number = 0
    while True:
        try:
            return await ask()
        except Unreachable as error:
            if not goes_on():
                raise
            tell_away(str(error))
        await asyncio.sleep(AGAIN_S[min(number, len(AGAIN_S) - 1)])
        number += 1
