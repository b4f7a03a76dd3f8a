"""Where a learner's folder lies, whose name it gives, and who has it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import islice
from pathlib import Path
from threading import Thread

import pytest

from atoll.learner.folder import LearnerFolder, ask_run, claim_folder, default_names, make_proof, run_or_address
from atoll.protocol.errors import ConfigError
from atoll.protocol.limits import is_name

SYNCER = "http://127.0.0.1:7077"
HOLD = """
import sys
from atoll.learner.folder import claim_folder
folder = claim_folder(sys.argv[1], sys.argv[2])
print(folder.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ATOLL_FOLDER", "SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)


class Other:
    """Another training process that has a folder until its input ends."""

    def __init__(self, name: str = "") -> None:
        command = [sys.executable, "-c", HOLD, SYNCER, name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.name = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def other() -> Iterator[list[Other]]:
    found: list[Other] = []
    yield found
    for one in found:
        one.kill()


def first(names: Iterator[str], count: int = 2) -> list[str]:
    return list(islice(names, count))


def test_a_script_that_changes_the_current_folder_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = claim_folder(SYNCER, "a")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert folder.path is not None and (folder.path / "lock").exists()
    monkeypatch.setenv("ATOLL_FOLDER", "state")
    named = claim_folder(SYNCER, "b")
    assert named.path == tmp_path / "elsewhere" / "state"


def test_the_default_name_is_the_machine_and_a_number() -> None:
    assert first(default_names({}, "Rack-3.example.org")) == ["rack-3-example-org-0", "rack-3-example-org-1"]
    assert first(default_names({}, "…"), 1) == ["learner-0"]
    assert all(is_name(name) for name in first(default_names({}, "x" * 100)))


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_NAME": "train"}, ["train-3", "train-3-1"]),
        ({"SLURM_ARRAY_TASK_ID": "3"}, ["node7-3", "node7-3-1"]),
        ({"JOB_COMPLETION_INDEX": "7"}, ["node7-7", "node7-7-1"]),
        ({"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}, ["node7-1", "node7-1-1"]),
        ({"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}, ["node7-0", "node7-1"]),
        ({"SLURM_ARRAY_TASK_ID": "../x"}, ["node7-0", "node7-1"]),
    ],
)
def test_a_schedulers_index_is_the_number(env: dict[str, str], names: list[str]) -> None:
    assert first(default_names(env, "node7")) == names


def test_a_pod_that_is_called_by_its_index_has_that_name() -> None:
    assert first(default_names({"JOB_COMPLETION_INDEX": "4"}, "job-4"), 1) == ["job-4"]


@pytest.mark.parametrize(
    ("syncer", "folder"),
    [
        (SYNCER, "127.0.0.1-7077"),
        ("http://[::1]:7077", "1-7077"),
        ("atoll://127.0.0.1:7077/20261116-083512", "20261116-083512"),
        (f"{SYNCER},http://127.0.0.1:7078", "127.0.0.1-7077"),
    ],
)
def test_folders_are_kept_apart_by_run_or_address(syncer: str, folder: str) -> None:
    assert run_or_address(syncer) == folder


def save_part(folder: Path | None, run: str) -> Path:
    assert folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run").write_text(run)
    (folder / "cut-000001.safetensors").touch()
    return folder


@pytest.mark.parametrize("again", ["http://127.0.0.1:7177", "atoll://127.0.0.1:7177/r1"])
def test_what_is_saved_is_found_by_the_run_also_at_another_address(tmp_path: Path, again: str) -> None:
    first = claim_folder(SYNCER, "anna")
    saved = save_part(first.enter_run("r1"), "r1")
    assert saved == tmp_path / "atoll-learners" / "r1" / "anna"
    first.release()
    assert claim_folder(again, "anna").enter_run("r1") == saved


def test_two_runs_on_one_address_have_folders_of_their_own() -> None:
    first = claim_folder(SYNCER, "anna")
    saved = save_part(first.enter_run("r1"), "r1")
    first.release()
    second = claim_folder(SYNCER, "anna").enter_run("r2")
    assert second is not None and second != saved and not list(second.glob("cut-*"))


def test_what_an_earlier_version_saved_by_the_address_is_found_if_it_is_of_this_run(tmp_path: Path) -> None:
    old = save_part(tmp_path / "atoll-learners" / "127.0.0.1-7077" / "anna", "r1")
    moved = claim_folder("http://127.0.0.1:7177", "anna")
    assert moved.enter_run("r1") == old
    moved.release()
    here = claim_folder(SYNCER, "anna")
    assert here.enter_run("r1") == old == here.path
    assert here.enter_run("r2") == tmp_path / "atoll-learners" / "r2" / "anna"


def test_a_folder_that_is_named_serves_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_FOLDER", str(tmp_path / "own"))
    assert claim_folder(SYNCER, "anna").enter_run("r1") == tmp_path / "own"


def test_a_process_that_came_by_a_link_has_the_folder_of_its_run() -> None:
    by_link, by_address = claim_folder("atoll://127.0.0.1:7077/r1", "anna"), claim_folder(SYNCER, "anna")
    with pytest.raises(ConfigError, match=r"anna is here already, from .+, pid \d+"):
        by_address.enter_run("r1")
    by_link.release()
    assert by_address.enter_run("r1") == by_link.path


class Answers(BaseHTTPRequestHandler):
    code, body = 200, b'{"run": "r1", "phase": "waiting"}'

    def do_GET(self) -> None:
        self.send_response(self.code)
        self.end_headers()
        self.wfile.write(self.body if self.path == "/v1/status" else b"")

    def log_message(self, format: str, *words: object) -> None:
        pass


@pytest.mark.parametrize(
    ("code", "body", "run"), [(200, Answers.body, "r1"), (401, Answers.body, ""), (200, b"<html>", "")]
)
def test_the_syncer_at_an_address_says_which_run_it_serves(code: int, body: bytes, run: str) -> None:
    with HTTPServer(("127.0.0.1", 0), type("Told", (Answers,), {"code": code, "body": body})) as server:
        Thread(target=server.handle_request).start()
        assert ask_run(f"http://127.0.0.1:{server.server_port}") == run
    assert ask_run(f"http://127.0.0.1:{server.server_port}") is None, "nobody is there any more"


def test_a_named_learner_has_a_folder_below_the_current_one(tmp_path: Path) -> None:
    folder = claim_folder(SYNCER, "anna")
    assert folder.path is not None
    assert folder.path.absolute() == tmp_path / "atoll-learners" / "127.0.0.1-7077" / "anna"
    assert stat.S_IMODE((folder.path / "succession").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "atoll-learners").stat().st_mode) == 0o700


def test_a_folder_that_is_named_gives_its_name_to_a_learner_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_FOLDER", str(tmp_path / "learner-3"))
    folder = claim_folder(SYNCER)
    assert (folder.name, folder.path) == ("learner-3", tmp_path / "learner-3")


def test_a_second_process_of_one_name_is_refused_with_who_has_it(other: list[Other]) -> None:
    other.append(Other("anna"))
    with pytest.raises(ConfigError, match=rf"anna is here already, from .+, pid {other[0].process.pid}: .+ --name"):
        claim_folder(SYNCER, "anna")


def test_a_folder_that_another_learner_has_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_FOLDER", str(tmp_path / "shared"))
    anna = claim_folder(SYNCER, "anna")
    with pytest.raises(ConfigError, match=r"shared is the folder of anna, pid \d+: choose another --folder for ben"):
        claim_folder(SYNCER, "ben")
    anna.release()


def test_a_second_process_with_a_default_name_takes_the_next_number(other: list[Other]) -> None:
    other.append(Other())
    machine = other[0].name.removesuffix("-0")
    assert claim_folder(SYNCER).name == f"{machine}-1"


def test_a_restart_has_the_old_name_and_the_old_proof_at_once(other: list[Other]) -> None:
    before = claim_folder(SYNCER)
    proof = before.proof
    before.release()
    other.append(Other())
    assert other[0].name == before.name
    other[0].kill()
    assert (again := claim_folder(SYNCER)).name == before.name
    assert again.proof == proof


def test_two_learners_of_one_process_are_two_as_well() -> None:
    one = claim_folder(SYNCER, "anna")
    with pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
        claim_folder(SYNCER, "anna")
    one.release()
    assert claim_folder(SYNCER, "anna").name == "anna"


def test_a_forked_worker_does_not_hold_the_folder_of_its_dead_parent(other: list[Other]) -> None:
    """Workers of a DataLoader live on for some seconds when their training process is killed."""
    script = f"""
import os, signal, sys
from atoll.learner.folder import claim_folder
folder = claim_folder({SYNCER!r}, "anna")
if os.fork() == 0:
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)
signal.pause()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        assert parent.stdout.readline().strip() == "ready"
        parent.kill()
        parent.wait()
        assert claim_folder(SYNCER, "anna").name == "anna"  # the worker still reads
        parent.stdin.close()


def test_a_proof_is_of_one_machine_and_no_secret_is_in_it() -> None:
    assert make_proof("secret", "a") == make_proof("secret", "a") != make_proof("secret", "b")
    assert "secret" not in make_proof("secret", "a")


def test_a_learner_without_a_folder_has_a_proof_of_its_own() -> None:
    assert LearnerFolder("anna").proof != LearnerFolder("anna").proof


def test_where_no_folder_can_be_made_it_trains_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATOLL_FOLDER", str(tmp_path / "file" / "learner-0"))
    assert claim_folder(SYNCER, "anna").path is None


def test_what_is_no_name_is_told() -> None:
    with pytest.raises(ConfigError, match="is no name"):
        claim_folder(SYNCER, "../anna")


def test_a_link_of_a_lost_run_leads_to_what_is_saved_of_the_run_that_goes_on_for_it(tmp_path: Path) -> None:
    folder = LearnerFolder("anna", tmp_path)
    assert folder.find_successor("lost") == "lost"
    folder.note_successor("new", ())
    assert folder.find_successor("lost") == "lost", "it goes on for none"
    folder.note_successor("new", ("older", "lost"))
    for run in ("older", "lost", "new"):
        assert folder.find_successor(run) == "new"
    assert folder.find_successor("another") == "another"
