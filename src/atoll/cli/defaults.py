"""What the settings are where the command line does not say: for its help, from the settings themselves."""

from __future__ import annotations

from atoll.cli.app import WAIT_S
from atoll.config import Config
from atoll.protocol.settings import USUAL
from atoll.workloads.settings import WorkloadSettings

WORDS = {
    "steps": "1000 for the built-in GPT; none for a script",
    "tokens": "no limit",
    "out": "atoll-runs/DATE-TIME",
    "fragments": f"{USUAL}, or fewer for a model of few tensors",
    "sync_every": f"{USUAL}",
    "cut_every": "ten times over every fragment",
    "port": "any",
    "wait": f"{WAIT_S:g}",
}
"""Where a number would say less."""


def setting_defaults() -> dict[str, str]:
    """By the names of the options of `atoll train`."""
    config, work = Config(), WorkloadSettings()
    names = ("learners", "quorum", "overlap", "guard", "adopt", "blend", "codec", "plan")
    found = {name: str(getattr(config.protocol, name)) for name in names}
    found |= {
        "merge": config.outer.merge,
        "outer_lr": str(config.outer.lr),
        "outer_momentum": str(config.outer.momentum),
    }
    found |= {"evaluate_every": str(config.service.evaluate_every), "seed": str(config.seed)}
    found |= {name: str(getattr(work, name)) for name in ("depth", "block", "batch", "lr")}
    return found | WORDS
