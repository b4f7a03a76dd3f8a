"""No task ends unnoticed: one of each kind is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.syncer.conftest import WAIT_S

from atoll.fabric import tasks
from atoll.fabric.tasks import (
    LOGGED_AT_ONCE,
    ConnectionErrors,
    TaskEnded,
    VitalTasks,
    keep_showing,
    lasting,
    start_for_connection,
)

Work = Callable[[], Coroutine[Any, Any, None]]


async def breaks() -> None:
    raise KeyError("a mistake")


async def returns() -> None:
    await asyncio.sleep(0)


async def waits() -> None:
    await asyncio.Event().wait()


async def meets_a_cancelled_future() -> None:
    never = asyncio.get_running_loop().create_future()
    never.cancel()
    await never


# ---- of one connection ------------------------------------------------------------------------------------------


async def test_a_task_of_a_connection_closes_it_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    mistakes, closed = ConnectionErrors(), asyncio.Event()
    await start_for_connection(breaks, closed.set, mistakes)
    assert closed.is_set() and mistakes.count == 1
    assert "closed by a mistake of ours (number 1)" in caplog.text and "KeyError: 'a mistake'" in caplog.text


async def test_mistakes_without_end_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    mistakes = ConnectionErrors()
    for _ in range(1000):
        await start_for_connection(breaks, lambda: None, mistakes)
    assert mistakes.count == 1000 and len(caplog.records) <= LOGGED_AT_ONCE + 1


async def test_a_task_of_a_connection_that_goes_well_or_is_cancelled_closes_nothing() -> None:
    mistakes, closed = ConnectionErrors(), asyncio.Event()
    await start_for_connection(returns, closed.set, mistakes)
    waiting = start_for_connection(waits, closed.set, mistakes)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled() and not closed.is_set() and not mistakes.count


# ---- showing ----------------------------------------------------------------------------------------------------


async def test_what_only_shows_is_started_again_with_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "AGAIN_S", 0.001)
    monkeypatch.setattr(tasks, "AGAIN_CAP_S", 0.004)
    works, alarms, stays = iter([breaks, returns, breaks, breaks, waits]), [], asyncio.Event()

    async def show() -> None:
        work = next(works)
        if work is waits:
            stays.set()
        await work()

    showing = asyncio.create_task(keep_showing("the dashboard", show, alarms.append))
    async with asyncio.timeout(WAIT_S):
        await stays.wait()
    assert (
        alarms
        == [
            f"the dashboard failed ({why}) and is started again in {wait} s; the run goes on"
            for why, wait in [("KeyError: 'a mistake'", 0.001), ("it ended", 0.002)]
        ]
        + ["the dashboard failed (KeyError: 'a mistake') and is started again in 0.004 s; the run goes on"] * 2
    )
    assert not showing.done()
    showing.cancel()
    await asyncio.wait([showing])


# ---- that a run depends on --------------------------------------------------------------------------------------


ENDS = [(breaks, KeyError), (returns, TaskEnded), (meets_a_cancelled_future, TaskEnded)]


async def group_of(*members: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        for member in members:
            group.create_task(member)
        await asyncio.Event().wait()


@pytest.mark.parametrize(("work", "error"), ENDS)
async def test_a_vital_task_that_ends_by_itself_ends_its_group(work: Work, error: type[Exception]) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await group_of(lasting("journal", work))
    assert isinstance(caught.value.exceptions[0], error)


@pytest.mark.parametrize(("work", "error"), ENDS)
async def test_so_does_one_that_was_started_elsewhere(work: Work, error: type[Exception]) -> None:
    vital = VitalTasks()
    vital.start("accept", work)
    with pytest.raises(ExceptionGroup) as caught:
        await group_of(vital.watch())
    assert isinstance(caught.value.exceptions[0], error) and vital.error is caught.value.exceptions[0]


async def test_a_vital_task_may_be_cancelled_by_its_owner() -> None:
    vital = VitalTasks()
    for task in (vital.start("accept", waits), vital.start("accept", waits)):
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    assert vital.error is None
