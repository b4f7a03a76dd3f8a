"""One run without keys, and everything that lives beside it on its machine: other commands, other users, web pages.

All tests of this file look at the same run, in this order: it is alive, two of its three learners leave, it is ended.

Other users and pages of elsewhere get nothing of it. Their attacks are those that worked before a run had secrets of
its own: read the weights, change a setting, drain a learner, post a score, look at status, dashboard and metrics, read
the files; and a name that was made to lead here.
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.system.conftest import SCRIPTS, Run, browser_page, members
from tests.system.test_secrets import PAGES, asked, leaks
from tests.system.test_two_terminals import paste

from atoll.fabric.address import SyncerAddress, parse_address
from atoll.store.verify import verify_run

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

LINE = (SCRIPTS / "line.py", "--set", "evaluate_every=0", "--set", "cut_every=10")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run whose folder lies where everybody may go. All three learners are in it, and a cut is made."""
    run = Run(tmp_path_factory.mktemp("live"))
    for folder in (run.folder, *run.folder.parents):
        if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o055)
    try:
        run.train(*LINE, "--learners", "3", "--steps", "1000000", "--", "--pace", "0.1")
        run.until(lambda events: len(members(events)) == 3 and any(event["kind"] == "cut" for event in events))
        yield run
    finally:
        run.kill()


@pytest.fixture(scope="module")
def secrets(live: Run) -> list[bytes]:
    """The run's own, and what proves each learner's succession."""
    kept = [file for file in (live.out / "secrets").iterdir() if file.name != ".gitignore"]
    assert {file.name for file in kept} >= {"join", "operator", "viewer", "evaluator", "relay"}
    proofs = list(live.out.glob("learners/*/succession"))
    assert len(proofs) == 3
    files = [*kept, *proofs]
    return [path.read_text().strip().encode() for path in files]


@pytest.fixture(scope="module")
def ended(live: Run, secrets: list[bytes]) -> Run:
    live.interrupt()
    live.ended()
    live.until_gone(2.0)
    return live


def until_rounds(run: Run, more: int) -> None:
    before = len(run.events("round"))
    run.until(lambda events: sum(event["kind"] == "round" for event in events) > before + more)


# ---- other commands --------------------------------------------------------------------------------------------------

NEW = (
    "run.toml",
    "environment.json",
    "syncer.url",
    "events.jsonl",
    "journal/lock",
    "journal/terms/000001",
    "logs/syncer.log",
)


def identities(out: Path) -> dict[str, int]:
    """Which files they are: one that was removed and made again is another."""
    return {name: (out / name).stat().st_ino for name in NEW}


def test_a_live_run_is_refused_by_name_and_goes_on(live: Run) -> None:
    """Neither --force nor --demo replaces it, and it is not gone on with beside itself."""
    before, settings = identities(live.out), (live.out / "run.toml").read_bytes()
    for said in (
        live.command("train", *LINE, "--force", "--out", live.out),
        live.ask("train", "--demo", "--out", live.out),
        live.ask("train", "--resume", live.out, "--steps", "9"),
    ):
        assert said.returncode == 2, said
        assert said.stderr == (
            f"atoll: run {live.out} is alive, pid {live.pid_of_command()}: "
            "end it first, or use another folder; nothing of it was touched\n"
        )
    said = live.ask("syncer", "--resume", live.out, "--steps", "9")
    assert said.returncode == 2 and f"{live.out} is served by another syncer" in said.stderr
    assert identities(live.out) == before and (live.out / "run.toml").read_bytes() == settings
    until_rounds(live, 5)


@pytest.mark.faults
def test_a_syncer_without_a_supervisor_is_refused_by_name_too(run: Run) -> None:
    run.start("syncer", "--learners", "1", "--port", "0", "--out", run.out)
    run.until(lambda events: any(e["kind"] == "run" for e in events))
    run.address()
    said = run.command("train", *LINE, "--force", "--out", run.out)
    assert said.returncode == 2
    assert f"run {run.out} is alive, pid {run.pid_of_command()}, term 1: " in said.stderr
    assert (run.out / "journal" / "lock").exists()
    run.interrupt()
    run.ended()
    again = run.command("train", *LINE, "--learners", "1", "--steps", "9", "--force", "--out", run.out)
    assert again.returncode == 0, "once it is over it may be replaced"


# ---- other users -----------------------------------------------------------------------------------------------------

ATTACK = r"""
import http.client, json, os, sys
url, folder, runtime = sys.argv[1:]
host, port = url.removeprefix("http://").split(":")
found = {}
def ask(name, method, path, body=None, **headers):
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.request(method, path, body, {"Host": f"{host}:{port}", **headers})
    answer = connection.getresponse()
    found[name] = [answer.status, answer.read().decode(errors="replace")[:200]]
ask("weights", "GET", "/v1/fragments/0")
ask("manifest", "GET", "/v1/manifest")
ask("status", "GET", "/v1/status")
ask("dashboard", "GET", "/")
ask("metrics", "GET", "/metrics")
ask("settings", "POST", "/v1/settings", '["outer_lr=9"]')
ask("drain", "POST", "/v1/drain", '["learner-0"]')
ask("score", "POST", "/v1/scores", '{"round": %s, "loss": 1.0, "cpu_s": 0.0}' % ("9" * 401))
ask("code", "POST", "/v1/codes", "")
ask("join", "GET", "/v1/control", None, Upgrade="websocket", Connection="Upgrade",
    **{"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="})
for place in (folder, folder + "/run.toml", folder + "/secrets/operator", runtime):
    try:
        found[place] = os.listdir(place) if os.path.isdir(place) else open(place).read()
    except OSError as error:
        found[place] = type(error).__name__
print(json.dumps({"uid": os.geteuid(), "found": found}))
"""


def as_nobody(*words: str) -> dict[str, Any]:
    nobody = pwd.getpwnam("nobody")
    done = subprocess.run(
        [shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin") or sys.executable, "-I", "-c", ATTACK, *words],
        user=nobody.pw_uid,
        group=nobody.pw_gid,
        extra_groups=[],
        env={"PATH": os.environ["PATH"]},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["uid"] == nobody.pw_uid
    return dict(said["found"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user")
def test_another_user_of_the_machine_gets_nothing(live: Run) -> None:
    url, runtime = live.address(), Path(f"/tmp/atoll-{os.geteuid()}")
    found = as_nobody(url, str(live.out), str(runtime))
    ports = {name: answer for name, answer in found.items() if not name.startswith("/")}
    assert len(ports) == 10 and all(status == 401 for status, _ in ports.values()), ports
    files = {name: answer for name, answer in found.items() if name.startswith("/")}
    assert set(files.values()) <= {"PermissionError", "FileNotFoundError"} and len(files) == 4, files
    assert files[str(live.out)] == "PermissionError"
    open_to_others = [path for path in [live.out, *live.out.rglob("*")] if path.stat().st_mode & 0o077]
    assert open_to_others == []

    # The same user goes on as before, by the address alone, and nothing that was tried has changed anything.
    assert live.ask("set", url, "outer_lr=0.5").stdout.startswith("changed:")
    status = json.loads(live.ask("status", url, "--json").stdout)
    assert status["validation_round"] is None and [one["state"] for one in status["learners"]] == ["training"] * 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user")
def test_another_user_joins_by_a_link(live: Run) -> None:
    link = live.ask("tokens", "link", "viewer", "--run", live.out).stdout.strip()
    assert link.startswith("atoll://") and link.endswith(f"@{live.address().removeprefix('http://')}/")
    env = {**live.environment(), "XDG_RUNTIME_DIR": "/nonexistent", "TMPDIR": str(live.folder), "ATOLL_LINK": link}
    command = [sys.executable, "-m", "atoll.cli", "status", "atoll://", "--json"]
    seen = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert json.loads(seen.stdout)["phase"] == "training"
    command = [sys.executable, "-m", "atoll.cli", "set", "atoll://", "outer_lr=0.5"]
    refused = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert refused.returncode and "is for a viewer, and this takes an operator" in refused.stderr
    plain = {**env, "ATOLL_LINK": ""}
    command = [sys.executable, "-m", "atoll.cli", "status", live.address()]
    refused = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=300, check=False)
    assert refused.returncode and "this syncer asks for a token" in refused.stderr


# ---- web pages of elsewhere ------------------------------------------------------------------------------------------

TRY = """async (target) => {
    const tried = {};
    const reads = ["/v1/fragments/0", "/v1/status", "/v1/manifest", "/", "/metrics"];
    for (const path of [...reads, "/v1/settings", "/v1/drain"]) {
        const post = path.endsWith("settings") || path.endsWith("drain");
        try {
            const answer = await fetch(target + path, {method: post ? "POST" : "GET", credentials: "include",
                                                       body: post ? '["outer_lr=9"]' : undefined});
            tried[path] = answer.status;
        } catch (error) { tried[path] = "unreadable"; }
    }
    tried.socket = await new Promise((done) => {
        const socket = new WebSocket(target.replace("http", "ws") + "/v1/live");
        socket.onmessage = () => done("heard");
        socket.onerror = () => done("refused");
    });
    return tried;
}"""


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>elsewhere</title>")

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def elsewhere() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
def page() -> Iterator[Any]:
    with browser_page("--host-resolver-rules=MAP evil.example 127.0.0.1") as page:
        page.set_default_timeout(120_000)
        yield page


def test_a_page_of_elsewhere_and_a_name_made_to_lead_here_get_nothing(page: Any, live: Run, elsewhere: int) -> None:
    """Also in the browser that has the cookie of the dashboard, and from a page of the same host and another port."""
    url = live.address()
    page.goto(live.command("dashboard", url).stdout.strip())  # the browser's event loop runs in this thread
    page.wait_for_selector("body[data-connection=live]")
    [cookie] = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert page.evaluate("() => document.cookie") == ""
    for origin in (f"http://evil.example:{elsewhere}", f"http://127.0.0.1:{elsewhere}"):
        page.goto(origin)
        tried = page.evaluate(TRY, url)
        assert tried.pop("socket") == "refused" and set(tried.values()) == {"unreadable"}, (origin, tried)

    # DNS rebinding: the page's own name leads to the syncer, so that the page may read what it answers.
    rebound = f"http://evil.example:{url.rpartition(':')[2]}"
    assert page.goto(f"{rebound}/").status == 401
    tried = page.evaluate(TRY, rebound)
    assert tried.pop("socket") == "refused" and set(tried.values()) <= {401, 403}, tried


# ---- its secrets -----------------------------------------------------------------------------------------------------


def test_no_process_no_answer_and_no_command_shows_a_secret(live: Run, secrets: list[bytes]) -> None:
    url = live.address()
    seen = {str(path): path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()}
    assert any(str(live.out).encode() in words for words in seen.values())
    assert leaks(secrets, **seen) == []
    answers = asyncio.run(answered_in_the_clear(parse_address(url, {})))
    assert [answers[path][0] for path in ("/", "/metrics", "/v1/status", "/v1/fragments/0")] == [200] * 4
    assert leaks(secrets, **{path: body for path, (_, body) in answers.items()}) == []
    told = [live.ask("status", url, "--json"), live.ask("set", url, "x=1"), live.ask("dashboard", url)]
    assert [one.returncode for one in told] == [0, 2, 0], [one.stderr for one in told]
    check_told(secrets, told)


async def answered_in_the_clear(boss: SyncerAddress) -> dict[str, tuple[int, bytes]]:
    return {path: await asked(boss, path) for path in PAGES}


def check_told(secrets: list[bytes], told: list[subprocess.CompletedProcess[str]]) -> None:
    assert leaks(secrets, **{str(one.args): (one.stdout + one.stderr).encode() for one in told}) == []


def test_a_second_process_of_one_name_is_refused_and_the_run_goes_on(live: Run) -> None:
    """The sample of test_two_terminals.py in every run of the tests."""
    second = paste(live, live.folder / "elsewhere", "--syncer", live.address(), "--name", "learner-0")
    assert second.returncode == 2 and "Traceback" not in second.stderr
    line = second.stderr.strip().splitlines()[-1]
    assert line.startswith(f"atoll: learner-0 is here already, from {socket.gethostname()}, pid ")
    until_rounds(live, 5)


# ---- how its learners leave, and how it ends -------------------------------------------------------------------------


def test_a_drained_learner_leaves(live: Run) -> None:
    asked = live.ask("drain", "learner-2", "--run", live.address())
    assert asked.returncode == 0 and asked.stdout.startswith("learner-2 is leaving: it stopped at step ")
    live.until(lambda events: any(e["kind"] == "exited" and e["process"] == "learner-2" for e in events))
    left = next(e for e in live.events("left") if e["learner"] == "learner-2")
    assert left["unmerged_tokens"] == 0
    until_rounds(live, 5)


def test_a_learner_whose_machine_is_taken_away_leaves_in_good_order(live: Run) -> None:
    os.kill(live.pid("learner-1"), signal.SIGTERM)
    live.until(lambda events: any(e["kind"] == "exited" and e["process"] == "learner-1" for e in events))
    left = next(e for e in live.events("left") if e["learner"] == "learner-1")
    assert "its machine is taken away" in left["text"] and left["unmerged_tokens"] == 0
    assert next(e for e in live.events("exited") if e["process"] == "learner-1")["code"] == 0
    assert (live.out / "learners" / "learner-1" / "preempted.safetensors").exists()
    until_rounds(live, 5)


def test_an_interrupt_ends_the_run_in_good_order(ended: Run) -> None:
    assert ended.summary["reason"] == "the operator asked for it"
    assert ended.summary["tokens"]["lost"] == 0
    assert (ended.out / "model.safetensors").exists()
    report = verify_run(ended.out)
    assert report.ok and report.facts["terms"] == 1, report.problem
    assert not any("outer_lr=9" in json.dumps(event) for event in ended.events("changed")), "no attack came through"
    assert [path for path in ended.out.rglob("*") if path.stat().st_mode & 0o077] == []


def test_the_secrets_of_a_run_without_keys_are_in_its_folder_of_secrets_alone(ended: Run, secrets: list[bytes]) -> None:
    told = [ended.ask("report", ended.out), ended.ask("verify", ended.out)]
    told.append(ended.ask("export", ended.out, ended.folder / "exported"))
    assert [one.returncode for one in told] == [0, 0, 0], [one.stderr for one in told]
    check_told(secrets, told)
    files = {
        str(path): path.read_bytes()
        for path in ended.folder.rglob("*")
        if path.is_file() and path.parent != ended.out / "secrets" and path.name != "succession"
    }
    assert {"run.toml", "events.jsonl", "report.html", "summary.json", "exported"} <= {
        part for name in files for part in Path(name).parts
    }
    assert leaks(secrets, **files, stdout=ended.stdout.encode(), stderr=ended.stderr.encode()) == []
