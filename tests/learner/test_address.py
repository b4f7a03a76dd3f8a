from __future__ import annotations

from pathlib import Path

import pytest

from atoll.learner.script import find_syncer

LINK = "atoll://" + "t" * 32 + "@127.0.0.1:7077/r1"


def test_a_script_without_a_word_is_alone() -> None:
    assert find_syncer({}) == "" == find_syncer({"ATOLL_SYNCER": "", "ATOLL_JOIN": ""})


def test_plain_python_joins_by_a_link_an_address_or_a_file(tmp_path: Path) -> None:
    assert find_syncer({"ATOLL_JOIN": LINK}) == LINK
    assert find_syncer({"ATOLL_JOIN": "http://127.0.0.1:7077"}) == "http://127.0.0.1:7077"
    file = tmp_path / "link"
    file.write_text(f"{LINK}\n")
    file.chmod(0o600)
    assert find_syncer({"ATOLL_JOIN": str(file)}) == LINK


def test_what_a_launcher_says_goes_before() -> None:
    assert find_syncer({"ATOLL_SYNCER": "http://127.0.0.1:7078", "ATOLL_JOIN": LINK}) == "http://127.0.0.1:7078"


def test_a_file_that_others_can_read_ends_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "link"
    file.write_text(LINK)
    file.chmod(0o644)
    with pytest.raises(SystemExit) as caught:
        find_syncer({"ATOLL_JOIN": str(file)})
    assert caught.value.code == 2 and "chmod 600" in capsys.readouterr().err
