"""examples/nginx.conf in front of a syncer, and real learners by the link: TLS that nginx ends, or passes on unread."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.system.conftest import SCRIPTS, WAIT_S, Run, members
from tests.system.joining import link_of, make_keys

from atoll.fabric.certificates import fingerprint, make_server
from atoll.store.verify import verify_run

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
CONF = Path(__file__).parents[2] / "examples" / "nginx.conf"
WIDE = ("--", "--width", "1024")
"""Fragments of 4 MiB: more than nginx takes, or keeps in memory, unless it is told to."""

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(NGINX is None, reason="there is no nginx here: apt-get install nginx libnginx-mod-stream"),
]


def conf(folder: Path, ports: dict[str, int]) -> str:
    """The example with this test's names in it; nothing else is changed."""
    text = CONF.read_text().replace("/etc/nginx/syncer.", f"{folder}/nginx.")
    text = text.replace("listen 443 ssl", f"listen 127.0.0.1:{ports['443']} ssl")
    text = text.replace("listen 7443", f"listen 127.0.0.1:{ports['7443']}")
    for inner in ("7077", "7078"):
        text = re.sub(rf"127\.0\.0\.1:{inner}\b", f"127.0.0.1:{ports[inner]}", text)
    text = text.replace("worker_processes auto", "worker_processes 1")
    module = re.search(r"load_module .*;.*\n", text)
    assert module is not None
    dynamic = "--with-stream=dynamic" in _built()
    path = f"load_module {_modules()}/ngx_stream_module.so;\n" if dynamic else ""
    return text.replace(module[0], path)


def _built() -> str:
    assert NGINX is not None
    return subprocess.run([NGINX, "-V"], capture_output=True, text=True, check=True).stderr


def _modules() -> str:
    found = re.search(r"--modules-path=(\S+)", _built())
    return found[1] if found else "modules"


@contextmanager
def nginx(folder: Path, ports: dict[str, int]) -> Iterator[None]:
    pair = make_server(["127.0.0.1"], 1.0)
    (folder / "nginx.crt").write_bytes(pair.certificate)
    (folder / "nginx.key").write_bytes(pair.key)
    (folder / "nginx.conf").write_text(conf(folder, ports))
    words = f"daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log warn;"
    assert NGINX is not None
    command = [NGINX, "-e", f"{folder}/nginx.log", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", words]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    if "ngx_stream_module.so" in checked.stderr:
        pytest.skip("nginx has no stream module here: apt-get install libnginx-mod-stream")
    assert checked.returncode == 0, checked.stderr
    server = subprocess.Popen(command)
    try:
        _until_open(ports["443"])
        yield
    finally:
        server.terminate()
        server.wait(10)


def _until_open(port: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.fixture
def ports(run: Run) -> dict[str, int]:
    return {name: run.free_port() for name in ("443", "7443", "7077", "7078")}


def _contributes(run: Run, link: str) -> None:
    """A learner with fragments of megabytes is a member of rounds, and nothing is lost."""
    learner = run.beside("learn", SCRIPTS / "line.py", "--join", link, "--name", "learner-0", *WIDE)
    run.until(lambda events: members(events) == {("learner-0", 1)})
    run.until(lambda events: sum(e["kind"] == "round" for e in events) >= 10)
    run.interrupt()
    run.ended()
    assert learner.wait(60) == 0, (run.folder / "beside.log").read_text()
    report = verify_run(run.out)
    assert report.ok, report.problem
    assert not run.events("lost", "refused", "turned_away"), (run.folder / "nginx.log").read_text()


def test_nginx_ends_tls_and_passes_on_to_a_syncer_on_loopback(run: Run, ports: dict[str, int]) -> None:
    keys = make_keys(run)
    with nginx(run.folder, ports):
        front = run.folder / "nginx.crt"
        run.start(
            "syncer", "--learners", "1", "--out", run.out, "--keys", keys, "--port", str(ports["7077"]),
            "--front", front, "--advertise", f"127.0.0.1:{ports['443']}",
        )  # fmt: skip
        link = link_of(run, keys)
        assert f"@127.0.0.1:{ports['443']}/" in link and link.endswith(fingerprint(front.read_bytes()))
        assert run.address() == f"http://127.0.0.1:{ports['7077']}"
        asked = run.command("doctor", "--json", "--join", link)
        found = {check["name"]: check for check in json.loads(asked.stdout)["checks"]}
        assert found["bandwidth up"]["bytes"] > 1 << 20 and found["certificate"]["pinned"], found
        _contributes(run, link)


@pytest.mark.faults
def test_nginx_passes_tls_on_unread(run: Run, ports: dict[str, int]) -> None:
    keys = make_keys(run)
    with nginx(run.folder, ports):
        run.start(
            "syncer", "--learners", "1", "--out", run.out, "--keys", keys, "--port", str(ports["7078"]),
            "--advertise", f"127.0.0.1:{ports['7443']}",
        )  # fmt: skip
        link = link_of(run, keys)
        assert f"@127.0.0.1:{ports['7443']}/" in link
        assert link.endswith(fingerprint((keys / "syncer.crt").read_bytes()))
        _contributes(run, link)
