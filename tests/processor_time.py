"""The processor time of each test file, over the processes that its tests waited for: `make test` has a budget."""

from __future__ import annotations

import resource
from collections import Counter
from typing import Any

import pytest

SHOWN = 30


class ProcessorTime:
    """A plugin; with xdist each worker has one and hands its figures to that of the controller."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._counted_s = _read_seconds()

    def _count(self, where: str) -> None:
        now_s = _read_seconds()
        self._seconds[where] += now_s - self._counted_s
        self._counted_s = now_s

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        self._count("collecting tests and importing what they need")

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._count(item.location[0])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["processor_s"] = dict(self._seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._seconds.update(getattr(node, "workeroutput", {}).get("processor_s", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if terminalreporter.config.option.durations:
            terminalreporter.section("most processor time")
            for file, seconds in self._seconds.most_common(SHOWN):
                terminalreporter.write_line(f"{seconds:7.1f} s {file}")
            terminalreporter.write_line(f"{self._seconds.total():7.1f} s in all")


def _read_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
