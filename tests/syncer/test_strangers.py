from __future__ import annotations

import json

from atoll.syncer.strangers import Strangers
from atoll.telemetry.events import EventLog


def test_all_are_counted_and_one_a_second_is_told() -> None:
    lines: list[bytes] = []
    now = 0.0
    strangers = Strangers(EventLog(lines.append), lambda: now)
    for tenth in range(25):
        now = tenth / 10
        strangers.turned_away("192.0.2.1", "it has no token")
    assert [json.loads(line)["count"] for line in lines] == [1, 11, 21]
    assert json.loads(lines[0])["text"] == "192.0.2.1 was not let in: it has no token"
