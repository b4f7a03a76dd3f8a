"""Examples with other libraries: no model is downloaded, and a run is started as the system tests start theirs."""

from __future__ import annotations

import os

from tests.system.conftest import run as run

os.environ["HF_HUB_OFFLINE"] = "1"  # before a test imports transformers; the processes it starts inherit it
