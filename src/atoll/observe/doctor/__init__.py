"""`atoll doctor`: what would go wrong here. Every check measures one thing and says what to do about it.

Probes (how a figure is had) and judgements (what it means) are apart: a judgement is a pure function of figures.
Nothing is left behind: files that are written are removed again, and a syncer is only asked for what learners may ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from atoll.fabric.address import SyncerAddress
from atoll.observe.doctor import disk, machine, network, software, syncer
from atoll.observe.doctor.check import Check, Clocks

__all__ = ["Check", "examine"]

Announce = Callable[[str], None]
"""Told what is being measured."""


def examine(
    folder: Path,
    address: SyncerAddress | None = None,
    announce: Announce = lambda what: None,
    *,
    parameters: float | None = None,
    step_s: float | None = None,
) -> Iterator[Check]:
    """One check after the other, as they are done; `folder` is where a run would be written, `way` that to a syncer."""
    clocks = Clocks.now()
    announce("Python")
    yield software.python()
    announce("torch")
    yield software.torch()
    announce("the kernels")
    yield software.kernels()
    announce("the machine")
    yield machine.processors()
    yield machine.memory()
    yield machine.shared_memory()
    yield machine.open_files()
    announce("the disk")
    yield from disk.checks(folder)
    announce("the network")
    yield network.ports()
    yield network.card((address.proxy or address.urls[0]) if address is not None else None)
    if address is not None:
        announce(f"the way to {address.urls[0]}")
        yield from syncer.checks(address, parameters, step_s)
    yield machine.clock(clocks, Clocks.now())
