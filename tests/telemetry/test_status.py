from __future__ import annotations

import msgspec

from atoll.config import Config
from atoll.syncer.status import Meter
from atoll.telemetry.status import RunStatus


def test_a_status_travels_as_json() -> None:
    status = Meter(Config()).make_status(1.0, "r", None)
    assert msgspec.json.decode(msgspec.json.encode(status), type=RunStatus) == status
