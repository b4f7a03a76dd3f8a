"""Background tasks. Each is of one of three kinds, which say what happens when it fails; none ends unnoticed.

| kind | examples | when it fails |
| --- | --- | --- |
| `start_for_connection` | a TLS handshake | its connection is closed, logged and counted |
| `keep_showing` | the dashboard | it is started again, later each time, with an alarm; the run goes on |
| `VitalTasks`, `lasting` | accepting, the journal | the process exits nonzero: a supervisor or a standby acts |

A vital task has failed when it ends before it was cancelled, also without an error. What a peer sends must not be able
to end one: that is the work of whoever reads it. tests/architecture/test_tasks.py holds all other modules to this one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from atoll.fabric.wire import one_line
from atoll.protocol.errors import AtollError
from atoll.protocol.limits import Budget

AGAIN_S = 1.0
"""The first wait before something that shows the run is started again; it doubles …"""
AGAIN_CAP_S = 60.0
"""… up to this. Whatever then goes well for as long begins anew with the first wait."""
LOGGED_AT_ONCE, LOGGED_RATE = 10, 0.1
"""Mistakes of connections that are logged with their traceback, at once and a second; all are counted."""

Work = Callable[[], Coroutine[Any, Any, None]]
"""Begins when its task does: one that is cancelled before leaves nothing behind."""
_logger = logging.getLogger("atoll.tasks")


class TaskEnded(AtollError):
    """A task that the run depends on ended by itself."""


# ---- of one connection ------------------------------------------------------------------------------------------


class ConnectionErrors:
    """Ours, while a connection was served: counted, and so many of them logged."""

    def __init__(self) -> None:
        self.count = 0
        self._room: Budget | None = None

    def add(self, error: BaseException) -> None:
        now = asyncio.get_running_loop().time()
        self._room = self._room or Budget(LOGGED_AT_ONCE, LOGGED_RATE, now)
        self.count += 1
        if self._room.take(now, 1):
            _logger.error("a connection was closed by a mistake of ours (number %d)", self.count, exc_info=error)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """For what is done to one connection on behalf of others, who must not fail with it."""
        try:
            yield
        except Exception as error:
            self.add(error)


def start_for_connection(work: Work, close: Callable[[], None], mistakes: ConnectionErrors) -> asyncio.Task[None]:
    """`close` its connection if the work fails."""

    async def guarded() -> None:
        try:
            await work()
        except Exception as error:  # whatever it is, it concerns nobody else
            mistakes.add(error)
            with mistakes.caught():
                close()

    return asyncio.get_running_loop().create_task(guarded())


# ---- showing ----------------------------------------------------------------------------------------------------


async def keep_showing(name: str, show: Work, alarm: Callable[[str], None]) -> NoReturn:
    """Until cancelled. `alarm` is told of every failure."""
    clock, wait_s = asyncio.get_running_loop().time, AGAIN_S
    while True:
        began = clock()
        try:
            await show()
            error = "it ended"
        except Exception as failure:  # whatever it is, it is no reason to stop training
            error = f"{type(failure).__name__}: {failure}"
        if clock() - began > AGAIN_CAP_S:
            wait_s = AGAIN_S
        alarm(one_line(f"{name} failed ({error}) and is started again in {wait_s:g} s; the run goes on"))
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, AGAIN_CAP_S)


# ---- that a run depends on --------------------------------------------------------------------------------------


async def lasting(name: str, work: Work) -> NoReturn:
    """The work, which goes on until it is cancelled; TaskEnded or its own error if it does not. For a TaskGroup."""
    task = asyncio.current_task()
    assert task is not None
    try:
        await work()
    except asyncio.CancelledError:
        if task.cancelling():
            raise
    raise TaskEnded(f"the task {name!r} ended, and the run depends on it: the process ends, start it again")


class VitalTasks:
    """Tasks that begin where there is no TaskGroup; `watch` belongs into the TaskGroup of whoever owns them."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """Why the process has to end."""
        self._failed = asyncio.Event()

    def start(self, name: str, work: Work) -> asyncio.Task[NoReturn]:
        task = asyncio.get_running_loop().create_task(lasting(name, work), name=name)
        task.add_done_callback(self._ended)
        return task

    def fail(self, error: BaseException) -> None:
        """Something that is no task has failed, and the run depends on it."""
        self.error = self.error or error
        self._failed.set()

    async def watch(self) -> NoReturn:
        """Raises the first failure."""
        await self._failed.wait()
        assert self.error is not None
        raise self.error

    def _ended(self, task: asyncio.Task[NoReturn]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)
