"""Questions to the bandwidth calculator and its answers, one by one or every combination of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Literal, get_args

import msgspec

from atoll.protocol.errors import ConfigError
from atoll.simulate.bandwidth import (
    Bound,
    Codec,
    Spread,
    bandwidth,
    data_parallel,
    decoupled,
    effective_h,
    late_steps,
    utilization,
)

Method = Literal["data-parallel", "decoupled"]
METHODS: tuple[Method, ...] = get_args(Method)


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    method: Method
    codec: Codec
    step_s: float
    datacenters: int
    utilization: float
    gbit_s: float
    effective_h: float | None = None
    """Of decoupled only."""
    late_steps: float | None = None
    """Of decoupled only."""
    down: Codec | None = None
    """Where versions come back as another codec says."""


class Case(msgspec.Struct, frozen=True):
    """A method in a place."""

    method: Method
    run: Spread

    @property
    def bounds(self) -> list[Bound]:
        return data_parallel(self.run) if self.method == "data-parallel" else decoupled(self.run)

    @property
    def codec(self) -> Codec:
        return "bf16" if self.method == "data-parallel" else self.run.codec

    def at(self, gbit_s: float) -> Answer:
        return self._answer(utilization(self.bounds, self.run.step_s, gbit_s), gbit_s)

    def needs(self, wanted: float) -> Answer:
        try:
            return self._answer(wanted, bandwidth(self.bounds, self.run.step_s, wanted))
        except ConfigError as error:
            where = f"step {self.run.step_s:g} s, {self.run.datacenters} data centers"
            raise ConfigError(f"{self.method}, {where}: {error}") from None

    def _answer(self, utilization: float, gbit_s: float) -> Answer:
        run = self.run
        answer = Answer(self.method, self.codec, run.step_s, run.datacenters, utilization, gbit_s)
        if self.method == "data-parallel":
            return answer
        down = run.down if run.topology == "star" else None
        fresh = {"effective_h": effective_h(run, gbit_s), "late_steps": late_steps(run, gbit_s)}
        return msgspec.structs.replace(answer, **fresh, down=down)


def cases(
    run: Spread, methods: Iterable[Method], codecs: Sequence[Codec], steps_s: Iterable[float], places: Iterable[int]
) -> list[Case]:
    """Every combination once, in the order of the published tables."""
    return list(
        dict.fromkeys(
            Case(method, msgspec.structs.replace(run, step_s=step_s, datacenters=datacenters, codec=codec))
            for step_s, datacenters, method in product(steps_s, places, methods)
            for codec in (codecs if method == "decoupled" else codecs[:1])
        )
    )
