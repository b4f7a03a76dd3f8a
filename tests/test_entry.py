"""A join link leaves the command line before anybody reads it there."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from pathlib import Path

import pytest

from atoll import cli, entry
from atoll.fabric.address import parse_address

SECRET = "f00d" * 16
LINK = f"atoll://{SECRET}@127.0.0.1:7077/r1/{'ab' * 32}"
OTHER = f"atoll://{'beef' * 16}@127.0.0.1:7078/r2/{'cd' * 32}"


@pytest.mark.parametrize(
    ("words", "kept", "moved"),
    [
        ("atoll train", "atoll train", {}),
        ("atoll learn s.py --join LINK --name a", "atoll learn s.py --name a", {"ATOLL_JOIN": LINK}),
        ("atoll learn s.py --join=LINK", "atoll learn s.py", {"ATOLL_JOIN": LINK}),
        ("atoll learn s.py --join OTHER --join LINK", "atoll learn s.py", {"ATOLL_JOIN": LINK}),
        ("atoll learn s.py --join=OTHER --join LINK -- --x", "atoll learn s.py -- --x", {"ATOLL_JOIN": LINK}),
        ("atoll learn s.py -- --join LINK", "atoll learn s.py -- --join LINK", {}),
        ("atoll learn s.py --join LINK -- --join x", "atoll learn s.py -- --join x", {"ATOLL_JOIN": LINK}),
        ("atoll learn s.py --join", "atoll learn s.py --join", {}),
        ("atoll learn s.py --join -- x", "atoll learn s.py --join -- x", {}),
        ("atoll learn s.py --joiner LINK", "atoll learn s.py --joiner atoll://", {"ATOLL_LINK": LINK}),
        ("atoll status LINK --watch", "atoll status atoll:// --watch", {"ATOLL_LINK": LINK}),
        ("atoll doctor --syncer=LINK", "atoll doctor --syncer=atoll://", {"ATOLL_LINK": LINK}),
        ("atoll status http://127.0.0.1:7077", "atoll status http://127.0.0.1:7077", {}),
        ("atoll status atoll://127.0.0.1:7077/r1", "atoll status atoll://127.0.0.1:7077/r1", {}),
    ],
)
def test_links_are_moved_to_the_environment(words: str, kept: str, moved: dict[str, str]) -> None:
    said = [
        {"LINK": LINK, "OTHER": OTHER}.get(w, w.replace("OTHER", OTHER).replace("=LINK", f"={LINK}"))
        for w in words.split()
    ]
    left, secrets = entry.without_links(said)
    assert (left, secrets) == ([LINK if word == "LINK" else word for word in kept.split()], moved)


def test_the_same_link_twice_is_one() -> None:
    words = ["atoll", "status", LINK, f"--syncer={LINK}"]
    assert entry.without_links(words) == (["atoll", "status", "atoll://", "--syncer=atoll://"], {"ATOLL_LINK": LINK})


@pytest.mark.parametrize("words", [["status", LINK, OTHER], ["status", LINK, f"--syncer={OTHER}"]])
def test_two_different_links_are_refused_and_neither_is_told(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/atoll", *words])
    monkeypatch.setattr(os, "execv", lambda path, words: pytest.fail("it went on with one of them"))
    with pytest.raises(SystemExit) as ended:
        entry.main()
    said = "".join(capsys.readouterr())
    assert ended.value.code == 2 and "two different join links on one command line" in said
    assert "f00d" not in said and "beef" not in said


def test_what_stands_for_a_link_is_read_as_one() -> None:
    assert parse_address("atoll://", {"ATOLL_LINK": LINK}) == parse_address(LINK, {})


def test_the_process_starts_anew_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", ["/bin/atoll", "learn", "s.py", "--join", LINK])
    monkeypatch.delenv("ATOLL_JOIN", raising=False)
    monkeypatch.setattr(os, "execv", lambda path, words: (started.append(words), sys.exit(0)))
    with pytest.raises(SystemExit):
        entry.main()
    assert started == [[sys.executable, "/bin/atoll", "learn", "s.py"]]
    assert os.environ.pop("ATOLL_JOIN") == LINK


def test_the_list_of_processes_does_not_have_it(tmp_path: Path) -> None:
    """As a user starts it, with a script that looks at what everybody sees of it."""
    script = tmp_path / "look.py"
    script.write_text("from pathlib import Path\nprint(Path('/proc/self/cmdline').read_bytes())\n")
    atoll = tmp_path / "atoll"
    atoll.write_text("from atoll.entry import main\nmain()\n")
    done = subprocess.run(
        [sys.executable, str(atoll), "learn", str(script), "--join", LINK],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "look.py" in done.stdout and SECRET not in done.stdout + done.stderr


def test_nothing_is_imported_before_a_link_is_moved_but_what_moves_it() -> None:
    """It is in the list of processes meanwhile."""
    look = (
        "import collections.abc, os, sys; before = set(sys.modules)\n"
        "import atoll.entry; print(*set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", look], text=True, capture_output=True, timeout=60, check=True)
    assert set(done.stdout.split()) <= {"__future__", "atoll", "atoll.entry"}


def test_a_link_in_a_file_is_never_in_the_list_of_processes(tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    script.write_text("import os\nprint(os.environ['ATOLL_SYNCER'], flush=True)\ninput()\n")
    (tmp_path / "link").write_text(f"{LINK}\n")
    (tmp_path / "link").chmod(0o600)
    atoll = tmp_path / "atoll"
    atoll.write_text("from atoll.entry import main\nmain()\n")
    process = subprocess.Popen(
        [sys.executable, str(atoll), "learn", str(script), "--join", str(tmp_path / "link")],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    seen: set[bytes] = set()
    assert process.stdout is not None
    with process, selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while not ready.select(0.001):
            seen.add(Path(f"/proc/{process.pid}/cmdline").read_bytes())
        assert process.stdout.readline() == f"{LINK}\n"
        process.communicate("\n", timeout=60)
    assert process.returncode == 0 and len(seen) > 1 and not any(SECRET.encode() in words for words in seen)


def test_a_link_in_a_file_that_others_can_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").write_text(LINK)
    (tmp_path / "link").chmod(0o644)
    (tmp_path / "script.py").touch()
    monkeypatch.setattr(sys, "argv", ["atoll", "learn", str(tmp_path / "script.py"), "--join", str(tmp_path / "link")])
    with pytest.raises(SystemExit):
        cli.main()
    said = "".join(capsys.readouterr())
    assert "can be read by others on this machine: chmod 600" in said and SECRET not in said


def test_python_dash_m_atoll_starts_anew_as_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its path the folder of the package would come first among the places of modules."""
    begun: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", ["/somewhere/atoll/__main__.py", "status", LINK])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(os, "execv", lambda program, words: begun.append(words))
    monkeypatch.setattr(cli, "main", lambda: None)
    entry.main()
    assert begun == [[sys.executable, "-m", "atoll", "status", "atoll://"]]
