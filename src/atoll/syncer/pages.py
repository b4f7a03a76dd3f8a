"""Pages that show the run as it goes. They are made above this layer, and handed in or named.

A mistake in them is told, and they are started again; the run does not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from importlib import import_module
from typing import Any, NoReturn, Protocol, cast

from atoll.fabric.pages import Pages
from atoll.fabric.tasks import keep_showing
from atoll.protocol.errors import ConfigError
from atoll.store.rundir import RunDir
from atoll.telemetry.events import EventLog
from atoll.telemetry.status import RunStatus

Figures = Callable[[], RunStatus]
"""The state of the run now."""


class LivePages(Pages, Protocol):
    def run(self, figures: Figures) -> Coroutine[Any, Any, None]:
        """Follow the run until cancelled."""
        ...


Maker = Callable[[RunDir], LivePages]


def named(name: str) -> Maker:
    """`module:function`, as a supervisor hands it to a process of its own."""
    module, _, function = name.partition(":")
    try:
        return cast(Maker, getattr(import_module(module), function))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--pages {name} is not there ({error}): name a module and a function in it") from error


async def show(pages: LivePages, figures: Figures, events: EventLog) -> NoReturn:
    """Until cancelled."""
    await keep_showing("the dashboard", lambda: pages.run(figures), lambda text: events.say("alarm", text))
