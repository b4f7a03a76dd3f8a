"""Names of a run's actors in a cluster: the run's folder, and the process."""

from __future__ import annotations

import re
from pathlib import Path

NAMESPACE = "atoll"
CONTROLLER = "controller"


def name_run(folder: Path) -> str:
    """One name for one folder, whoever asks."""
    return re.sub(r"[^A-Za-z0-9._/-]", "_", str(folder.absolute()))


def name_actor(folder: Path, process: str) -> str:
    return f"{name_run(folder)}:{process}"
