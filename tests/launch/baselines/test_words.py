"""What a rank said is heard once, whatever else stands in its log."""

from pathlib import Path

from atoll.launch.baselines.words import Heard


def test_lines_are_heard_once_and_halves_are_waited_for(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    heard = Heard(log)
    assert heard.new() == []
    log.write_bytes(b'a warning of torch\n{"kind": "ready", "step": 0}\n{"kind": "st')
    assert heard.new() == [{"kind": "ready", "step": 0}]
    with log.open("ab") as file:
        file.write(b'ep", "step": 1}\n')
    assert heard.new() == [{"kind": "step", "step": 1}] and heard.new() == []


def test_a_line_that_a_kill_cut_off_does_not_spoil_the_next(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(b'{"kind": "step", "st{"kind": "ready", "step": 4}\n{"kind": "step", \n')
    assert Heard(log).new() == [{"kind": "ready", "step": 4}]
