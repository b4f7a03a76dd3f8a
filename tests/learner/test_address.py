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


@pytest.mark.parametrize(("content", "cause"), [(None, "missing"), ("", "empty"), (" \n", "empty")])
def test_a_file_without_a_link_ends_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, cause: str
) -> None:
    """An empty one made the script train alone."""
    file = tmp_path / "link.txt"
    if content is not None:
        file.write_text(content)
        file.chmod(0o600)
    with pytest.raises(SystemExit) as caught:
        find_syncer({"ATOLL_JOIN": str(file)})
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"atoll: ATOLL_JOIN names {file}, which is {cause}\n"


def test_a_token_alone_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        find_syncer({"ATOLL_JOIN": "f00d" * 16})
    assert capsys.readouterr().err == "atoll: ATOLL_JOIN names …, which is missing\n"


def test_an_address_without_http_is_no_file() -> None:
    assert find_syncer({"ATOLL_JOIN": "127.0.0.1:7077"}) == "127.0.0.1:7077"


def test_a_file_that_others_can_read_ends_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "link"
    file.write_text(LINK)
    file.chmod(0o644)
    with pytest.raises(SystemExit) as caught:
        find_syncer({"ATOLL_JOIN": str(file)})
    assert caught.value.code == 2 and "chmod 600" in capsys.readouterr().err


def test_what_a_script_gives_comes_first_and_may_be_a_file_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "link.txt"
    file.touch(mode=0o600)
    file.write_text(LINK)
    around = {"ATOLL_SYNCER": "http://127.0.0.1:7078"}
    assert find_syncer(around, str(file)) == LINK == find_syncer(around, LINK)
    with pytest.raises(SystemExit):
        find_syncer(around, str(tmp_path / "nowhere"))
    assert capsys.readouterr().err == f"atoll: syncer= names {tmp_path / 'nowhere'}, which is missing\n"


def test_a_replay_reads_no_file_with_a_link(tmp_path: Path) -> None:
    """It was read there too, where nobody dials and the file may be gone."""
    around = {"ATOLL_SYNCER": "replay", "ATOLL_REPLAY": str(tmp_path / "socket")}
    assert find_syncer(around, str(tmp_path / "nowhere")) == "replay"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (f"{LINK}\r\n".encode(), ""),
        (b"\xef\xbb\xbf" + LINK.encode(), ""),
        (LINK.encode("utf-16"), "is no text"),
        (f"{LINK}\n{LINK}\n".encode(), "holds something else than one join link"),
        (b"ask Anna for it", "holds something else than one join link"),
        (None, "is a folder: name the file in it"),
    ],
)
def test_what_is_in_the_place_of_a_link_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, said: str
) -> None:
    """A folder was to have its mode changed, and what a file held was quoted as an address without the file's name."""
    file = tmp_path / "link.txt"
    if content is None:
        file.mkdir(mode=0o755)
    else:
        file.write_bytes(content)
        file.chmod(0o600)
    if not said:
        assert find_syncer({"ATOLL_JOIN": str(file)}) == LINK
        return
    with pytest.raises(SystemExit) as caught:
        find_syncer({"ATOLL_JOIN": str(file)})
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(f"atoll: ATOLL_JOIN names {file}, which {said}")
