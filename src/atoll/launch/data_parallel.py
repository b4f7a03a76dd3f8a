"""The settings of a data-parallel run (`--algorithm data-parallel`).

Its ranks are the one learner of an ordinary run, so data, tokens, scores, snapshots and the summary are made as in any
other. The learner averages gradients over its ranks at every step (learner/averaging.py); here is what makes the run's
own merges leave its model as it is: of one contribution the plain mean, an outer step of length 1 and no momentum give
the learner's parameters back, and carry adds the steps since (docs/adr/0043).
"""

from __future__ import annotations

from msgspec import UNSET
from msgspec.structs import replace

from atoll.config import Config, Outer
from atoll.protocol.errors import ConfigError
from atoll.protocol.settings import Settings

NO_LIMIT = 1e12
PROTOCOL = {
    "learners": 1,
    "quorum": 1,
    "fragments": 1,  # what is scored, and what is written, is the model of one step
    "synchronous": False,
    "adopt": "carry",
    "codec": "fp32",
    "version_codec": "fp32",
    "share": UNSET,
    "phases": (),
    "warm_start": 0.0,
}
OUTER = {"merge": "mean", "optimizer": "sgd", "lr": 1.0, "momentum": 0.0, "norm_limit": NO_LIMIT, "robust": False}


def as_data_parallel(config: Config) -> Config:
    """The same run with a rank for each learner. Scores are as many steps apart as they would be with the default of a
    round for each step."""
    protocol, service = replace(config.protocol, **PROTOCOL), config.service
    if service.evaluate_every:
        service = replace(service, evaluate_every=max(1, service.evaluate_every // protocol.resolved_sync_every))
    return replace(
        config,
        algorithm="data-parallel",
        ranks=config.protocol.learners,
        protocol=protocol,
        outer=replace(config.outer, **OUTER),
        service=service,
    )


def check_no_merges(config: Config) -> None:
    """ConfigError names the first setting that data-parallel training has nothing for."""
    for table, default, replaced in ((config.protocol, Settings(), PROTOCOL), (config.outer, Outer(), OUTER)):
        for name, value in replaced.items():
            if name != "learners" and getattr(table, name) not in (value, getattr(default, name)):
                raise ConfigError(
                    f"--algorithm data-parallel averages gradients at every step and has no {name}: leave it out"
                )
