"""Where a learner stands in its run: what a cut keeps of it beside model, optimizer and chance.

Put back exactly, it is the same incarnation as before: same session, same counters, same base, as if the connection had
only been lost for a while.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from atoll.mailbox.box import Mailbox
from atoll.protocol.messages import TensorSpec
from atoll.protocol.settings import Settings


@dataclass
class Place:
    """As a `Stateful`, so that it travels with the other state."""

    state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.state = state_dict


def describe_place(
    box: Mailbox,
    settings: Settings,
    tensors: tuple[TensorSpec, ...],
    *,
    name: str,
    session: str,
    index: int,
    t: int,
    total: int,
    busy_s: float,
    feed: dict[str, Any],
) -> Place:
    fragments = range(len(box.plan.fragments))
    return Place(
        {
            "learner": name,
            "session": session,
            "index": index,
            "run": box.run,
            "incarnation": box.count("incarnation"),
            "settings": msgspec.to_builtins(settings),
            "tensors": msgspec.to_builtins(tensors),
            "t": t,
            "total": total,
            "busy_s": busy_s,
            "steps": box.steps.tolist(),
            "tokens": box.tokens.tolist(),
            "dropped": box.dropped.tolist(),
            "missed": box.missed.tolist(),
            "adopted": box.adopted.tolist(),
            "base_version": box.base_version.tolist(),
            "base": [torch.from_numpy(box.base(fragment)) for fragment in fragments],
            "feed": feed,
        }
    )


def settings_of(state: dict[str, Any]) -> Settings:
    return msgspec.convert(state["settings"], Settings)


def fill_box(box: Mailbox, state: dict[str, Any], run: str = "") -> None:
    """The shared memory as it was; `run`: the run that goes on from it, where that is a new one.

    A base that was half written then has no version, and is fetched again.
    """
    for name in ("steps", "tokens", "dropped", "adopted", "base_version"):
        getattr(box, name)[:] = state[name]
    box.missed[:] = state.get("missed", 0)  # cuts of earlier versions do not tell
    for fragment, base in enumerate(state["base"]):
        box.base(fragment)[:] = base.numpy()
    box.run = run or state["run"]
    box.set_count("incarnation", state["incarnation"])
