"""A keeper as the controller uses it, without a cluster around it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from atoll.launch.on_ray.keeper import Keeper, KeeperReport, ProcessOrder
from atoll.protocol.errors import ConfigError

PRINTS = "import os, sys; print(os.environ['WORD'], os.environ['HERE'], flush=True); sys.stdin.readline(); sys.exit(3)"


def order(place: Path, code: str, **more: object) -> bytes:
    log = str(place / "log")
    said = ProcessOrder("learner-0", ("-c", code), {"WORD": "secret"}, {"HERE": "missing"}, log, str(place))
    return msgspec.msgpack.encode(msgspec.structs.replace(said, **more))


def heard(report: bytes) -> KeeperReport:
    return msgspec.msgpack.decode(report, type=KeeperReport)


def until_ended(keeper: Keeper) -> KeeperReport:
    deadline = time.monotonic() + 60
    while (now := heard(keeper.report())).running:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return now


def test_it_starts_a_process_and_says_how_it_ended_as_often_as_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERE", "set")
    keeper = Keeper("10.0.0.1")
    assert heard(keeper.report()).number == 0
    begun = heard(keeper.start(order(tmp_path, PRINTS, obeys=True, tag="a b")))
    assert begun.running and begun.pid and (begun.node, begun.tag) == ("10.0.0.1", "a b")
    keeper.send_order("go")
    ended = until_ended(keeper)
    assert ended.code == 3 and heard(keeper.report()) == ended and ended.life == begun.life
    assert (tmp_path / "log").read_text() == "secret set\n", "what this node sets counts"


def test_a_second_start_takes_the_place_of_the_first(tmp_path: Path) -> None:
    keeper = Keeper()
    first = heard(keeper.start(order(tmp_path, "import time; time.sleep(600)")))
    second = heard(keeper.start(order(tmp_path, "import time; time.sleep(600)")))
    assert (first.number, second.number) == (1, 2)
    with pytest.raises(ProcessLookupError):
        os.kill(first.pid, 0)
    keeper.signal(signal.SIGTERM)
    assert until_ended(keeper).code == -signal.SIGTERM


def test_another_keeper_has_another_life() -> None:
    assert heard(Keeper().report()).life != heard(Keeper().report()).life


def test_a_folder_that_this_node_does_not_see_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not see"):
        Keeper().start(order(tmp_path, "pass", folder=str(tmp_path / "elsewhere")))
