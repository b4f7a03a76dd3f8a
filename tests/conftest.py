"""What every test shares: how hypothesis draws, one thread per process so that workers do not fight for cores,
processes that start with less in them (startup/), and a garbage collector that leaves the collected tests alone."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.processor_time import ProcessorTime

# Thousands of tests and all that they import stay to the end: there is nothing to find among them, now or later.
gc.disable()
# Before any test imports numpy or torch; processes that a test starts inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# aiohttp reads the certificates of every authority of the world when it is imported: 0.1 s. Tests bring their own.
os.environ.setdefault("SSL_CERT_FILE", os.devnull)
os.environ.setdefault("SSL_CERT_DIR", os.devnull)
# Runs that tests begin are remembered apart from those of whoever starts the tests.
os.environ["XDG_STATE_HOME"] = f"{tempfile.gettempdir()}/atoll-tests-{os.geteuid()}"
STARTUP = str(Path(__file__).parent / "startup")
if STARTUP not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STARTUP, os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, STARTUP)
    importlib.import_module("lean_torch").install()  # here too: a worker of xdist has done it by now

settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# They are the same ones every time there: it is elsewhere that new ones are tried, 100 of each property.
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True, max_examples=40)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ProcessorTime(), "processor-time")


SYSTEM_TIMEOUT_S = 900
"""Of a test with real processes: it waits for events several times, with four minutes of patience each time."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What starts processes comes first; what takes milliseconds fills the gaps at the end."""
    items.sort(key=lambda item: item.get_closest_marker("system") is None)
    if config.getoption("timeout") is None:
        for item in items:
            if item.get_closest_marker("system") and item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(SYSTEM_TIMEOUT_S))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a module's tests left lying is looked through once, and what then stays (their reports, compiled models,
    caches) never again: a whole collection took a tenth of a second in a worker that had run a thousand tests."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()
    # For the processes that tests start, not for these: workers of xdist have started by now.
    if session.config.option.markexpr != "faults":
        os.environ["ATOLL_TEST_KERNELS"] = "plain"
