"""The training process's side of the tape: every order it carried out, with the step after which it did."""

from __future__ import annotations

import torch

from atoll.learner.courier_process import CourierProcess
from atoll.mailbox.channel import Told
from atoll.protocol.tape import AnyEntry, Began, Numbered


class Recorder:
    def __init__(self, courier: CourierProcess) -> None:
        self._courier = courier
        self._entries = Numbered()
        self._said = 0

    def add(self, entry: AnyEntry) -> None:
        self._entries.add((entry,))

    def tell(self) -> None:
        """The courier hears what is new."""
        if self._said < self._entries.end:
            first, entries = self._entries.since(self._said)
            self._courier.send(Told(first, entries))
            self._said = self._entries.end

    def tell_again(self) -> None:
        """To a new courier, all that is kept: it passes over what the syncer has."""
        self._said = 0
        self.tell()


def describe_machine(t: int, device: torch.device, state: str, exact: bool) -> Began:
    return Began(
        t=t,
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        cpu=torch.backends.cpu.get_cpu_capability(),
        device=device.type,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        state=state,
        exact=exact,
    )
