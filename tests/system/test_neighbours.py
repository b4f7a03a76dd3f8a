"""What another user of the machine, and a web page of elsewhere, get of a real run without keys: nothing.

The attacks are those that worked before a run had secrets of its own: read the weights, change a setting, drain a
learner, post a score, look at status, dashboard and metrics, read the files; and a name that was made to lead here.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.system.conftest import SCRIPTS, Run

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

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


@pytest.fixture
def started(run: Run) -> Run:
    """A run whose folder lies where everybody may go."""
    for folder in (run.folder, *run.folder.parents):
        if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o055)
    run.train(SCRIPTS / "line.py", "--learners", "1", "--steps", "1000000", "--port", "0", "--evaluate-every", "0")
    run.until(lambda events: any(event["kind"] == "round" for event in events))
    return run


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user")
def test_another_user_of_the_machine_gets_nothing(started: Run) -> None:
    run, runtime = started, Path(f"/tmp/atoll-{os.geteuid()}")
    url = run.address()
    found = as_nobody(url, str(run.out), str(runtime))
    ports = {name: answer for name, answer in found.items() if not name.startswith("/")}
    assert len(ports) == 10 and all(status == 401 for status, _ in ports.values()), ports
    files = {name: answer for name, answer in found.items() if name.startswith("/")}
    assert set(files.values()) <= {"PermissionError", "FileNotFoundError"} and len(files) == 4, files
    assert files[str(run.out)] == "PermissionError"

    # The same user goes on as before, by the address alone, and nothing that was tried has changed anything.
    assert run.command("set", url, "outer_lr=0.5").stdout.startswith("changed:")
    status = json.loads(run.command("status", url, "--json").stdout)
    assert status["validation_round"] is None and [one["state"] for one in status["learners"]] == ["training"]
    assert run.command("drain", "learner-0", "--run", url).returncode == 0
    open_to_others = [path for path in [run.out, *run.out.rglob("*")] if path.stat().st_mode & 0o077]
    assert open_to_others == []
    run.interrupt()
    run.ended()
    assert [path for path in run.out.rglob("*") if path.stat().st_mode & 0o077] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user")
def test_another_user_joins_by_a_link(started: Run) -> None:
    run = started
    link = run.command("tokens", "link", "viewer", "--run", run.out).stdout.strip()
    assert link.startswith("atoll://") and link.endswith(f"@{run.address().removeprefix('http://')}/")
    env = {**run.environment(), "XDG_RUNTIME_DIR": "/nonexistent", "TMPDIR": str(run.folder), "ATOLL_LINK": link}
    command = [sys.executable, "-m", "atoll.cli", "status", "atoll://", "--json"]
    seen = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert json.loads(seen.stdout)["phase"] == "training"
    command = [sys.executable, "-m", "atoll.cli", "set", "atoll://", "outer_lr=0.5"]
    refused = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert refused.returncode and "is for a viewer, and this takes an operator" in refused.stderr
    plain = {**env, "ATOLL_LINK": ""}
    command = [sys.executable, "-m", "atoll.cli", "status", run.address()]
    refused = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=300, check=False)
    assert refused.returncode and "this syncer asks for a token" in refused.stderr
    run.interrupt()
    run.ended()


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
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on the PATH: no page is opened")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as at:
        rules = "--host-resolver-rules=MAP evil.example 127.0.0.1"
        opened = at.chromium.launch(executable_path=browser, args=["--no-sandbox", rules])
        page = opened.new_page()
        page.set_default_timeout(120_000)
        yield page
        opened.close()


def test_a_page_of_elsewhere_and_a_name_made_to_lead_here_get_nothing(page: Any, started: Run, elsewhere: int) -> None:
    """Also in the browser that has the cookie of the dashboard, and from a page of the same host and another port."""
    run, url = started, started.address()
    page.goto(run.command("dashboard", url).stdout.strip())
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
    run.interrupt()
    run.ended()
    assert not any("outer_lr" in json.dumps(event) for event in run.events("changed"))
