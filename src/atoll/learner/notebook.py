"""How far a learner is, below the cell of a notebook that trains it: one line, written anew every few seconds.

A thread of its own does that, so that no step pays for it. Elsewhere than in IPython's kernel there is none.
"""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Callable
from typing import Any

EVERY_S = 2.0


def show_progress(describe: Callable[[], str]) -> Callable[[], None]:
    """Show what `describe` says, until what this returns is called: then once more."""
    publish = _find_publisher()
    if publish is None:
        return lambda: None
    over, line = threading.Event(), {"display_id": secrets.token_hex(8)}

    def show(*, update: bool) -> None:
        publish(data={"text/plain": describe()}, transient=line, update=update)

    def go_on() -> None:
        ends = False
        while not ends:
            ends = over.wait(EVERY_S)
            show(update=True)

    show(update=False)
    threading.Thread(target=go_on, name="atoll-progress", daemon=True).start()
    return over.set


def _find_publisher() -> Callable[..., Any] | None:
    """How a kernel shows something that it can change later. A script in a terminal has not imported IPython, and
    IPython in a terminal has no kernel."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    return shell.display_pub.publish if hasattr(shell, "kernel") else None
