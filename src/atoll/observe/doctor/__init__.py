"""`atoll doctor`: what would go wrong here. Every check measures one thing and says what to do about it.

Temporary files are removed again, and a syncer is only asked for what learners may ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from atoll.fabric.address import SyncerAddress
from atoll.observe.doctor import link, local
from atoll.observe.doctor.local import Check, Clocks

__all__ = ["Check", "examine"]

"""Told what is being measured."""


def examine(
    folder: Path,
    address: SyncerAddress | None = None,
    announce: Callable[[str], None] = lambda what: None,
    *,
    parameters: float | None = None,
    step_s: float | None = None,
) -> Iterator[Check]:
    """One check after the other, as they are done; `folder`: where a run would be written."""
    clocks = Clocks.now()
    announce("Python")
    yield local.check_python()
    announce("torch")
    yield local.check_torch()
    announce("the kernels")
    yield local.check_kernels()
    announce("the machine")
    yield local.check_processors()
    yield local.check_memory()
    yield local.check_shared_memory()
    yield local.check_open_files()
    announce("the disk")
    yield from local.check_disk(folder)
    announce("the network")
    yield local.check_ports()
    yield local.check_card((address.proxy or address.urls[0]) if address is not None else None)
    if address is not None:
        announce(f"the way to {address.urls[0]}")
        yield from link.check_link(address, parameters, step_s)
    yield local.check_clock(clocks, Clocks.now())
