"""No secret is in any file that a run with keys wrote, in any answer of its port, or in the list of processes. Of a run
without keys test_neighbours.py shows it."""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from tests.system.conftest import SCRIPTS, Run, heed_interrupts, members

from atoll.fabric.address import SyncerAddress, parse_address
from atoll.fabric.join_tokens import new_secret
from atoll.store.keys import KeyDir
from atoll.syncer.credentials import read_tokens

pytestmark = [pytest.mark.system, pytest.mark.faults, pytest.mark.timeout(900)]

PAGES = ["/", "/metrics", "/v1/status", "/v1/manifest", "/assets/nothing", "/v1/fragments/0", "/v1/settings"]


@pytest.fixture
def beside() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for one in started:
        one.kill()
        one.wait()


async def asked(address: SyncerAddress, path: str, method: str = "GET") -> tuple[int, bytes]:
    url = f"{address.urls[0]}{path}"
    shown, tls = address.headers_for(url), address.context()
    async with aiohttp.ClientSession() as http, http.request(method, url, headers=shown, ssl=tls) as it:
        head = "\n".join(f"{name}: {value}" for name, value in it.headers.items())
        return it.status, head.encode() + await it.read()


async def looked_at(address: SyncerAddress) -> bytes:
    """The first that a viewer of the dashboard is told."""
    headers = {**address.headers_for(f"{address.urls[0]}/v1/live"), "Origin": address.urls[0]}
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{address.urls[0]}/v1/live", headers=headers, ssl=address.context()) as socket,
    ):
        return str((await socket.receive(timeout=10)).data).encode()


async def answered(boss: SyncerAddress, wrong: SyncerAddress) -> tuple[dict[str, tuple[int, bytes]], bytes, bytes]:
    answers = {path: await asked(boss, path) for path in PAGES}
    live, (_, stranger) = await looked_at(boss), await asked(wrong, "/v1/status")
    await asyncio.sleep(0.2)  # TLS closes in its own time, and aiohttp does not wait for it
    return answers, live, stranger


def secrets_of(keys: KeyDir) -> list[bytes]:
    """Each token as it is and as a browser shows it, and each line of each private key."""
    tokens = [token.secret.encode() for token in read_tokens(keys).all]
    lines = [line for key in keys.path.glob("*.key") for line in key.read_bytes().splitlines() if b"-----" not in line]
    assert len(tokens) == 3 and len(lines) >= 4
    return [*tokens, *(base64.b64encode(b":" + token) for token in tokens), *lines, b"PRIVATE KEY"]


def leaks(secrets: list[bytes], **places: bytes) -> list[str]:
    return [place for place, data in places.items() if any(secret in data for secret in secrets)]


def test_no_secret_leaves_the_folder_of_keys(run: Run, beside: list[subprocess.Popen[bytes]]) -> None:
    keys = KeyDir(run.folder / "keys")
    for words in (
        ("cert", "--out", keys.path, "--ca"),
        ("tokens", "--keys", keys.path, "add", "look", "--role", "viewer"),
    ):
        assert run.command(*words).returncode == 0
    run.start("syncer", "--out", run.out, "--keys", keys.path, "--bind", "127.0.0.1", "--port", "0", "--learners", "1")
    run.address()
    link = run.command("tokens", "--keys", keys.path, "link", "join").stdout.strip()
    address, secrets = parse_address(link, {}), secrets_of(keys)

    # A learner, as a person starts it, and one with a token that nobody knows.
    atoll = run.folder / "atoll"
    atoll.write_text("from atoll.entry import main\nmain()\n")
    wrong = SyncerAddress(urls=address.urls, run=address.run, token=new_secret(), pin=address.pin)
    secrets.append(wrong.token.encode())
    for name, shown in (("learner-0", link), ("stranger", wrong.link())):
        with (run.folder / f"{name}.log").open("wb") as log:
            command = [sys.executable, str(atoll), "learn", str(SCRIPTS / "line.py"), "--join", shown, "--name", name]
            command += ["--folder", str(run.out / "learners" / "learner-0")] if name == "learner-0" else []
            beside.append(
                subprocess.Popen(
                    command, cwd=run.folder, env=run.environment(), stdout=log, stderr=log, preexec_fn=heed_interrupts
                )
            )
    run.until(lambda events: bool(members(events)) and len(run.events("round")) > 4)
    run.until(lambda events: any(event["kind"] == "turned_away" for event in events))
    assert beside[1].wait(60) != 0, "the stranger is told, and ends"
    log = (run.folder / "stranger.log").read_text()
    assert "this token is not known here" in log and "Traceback" not in log

    # What everybody on this machine sees of its processes, and what its port says to those who may ask.
    seen = {str(path): path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()}
    assert any(b"line.py" in words for words in seen.values())
    assert leaks(secrets, **seen) == []
    boss = SyncerAddress(urls=address.urls, token=read_tokens(keys).named("operator").secret, pin=address.pin)
    answers, live, stranger = asyncio.run(answered(boss, wrong))
    assert [answers[path][0] for path in ("/", "/metrics", "/v1/status")] == [200, 200, 200]
    assert leaks(secrets, **{path: body for path, (_, body) in answers.items()}) == []
    assert leaks(secrets, live=live, stranger=stranger) == []

    # Commands that look at it, its end, and its report.
    told = [
        run.command("status", run.out),
        run.command("status", run.out, "--json"),
        run.command("set", run.out, "x=1"),
    ]
    assert [one.returncode for one in told] == [0, 0, 1]
    run.interrupt()
    run.ended()
    told += [run.command("report", run.out), run.command("verify", run.out), run.command("status", run.out)]
    assert [one.returncode for one in told[-3:]] == [0, 0, 0]
    for number, one in enumerate(told):
        assert leaks(secrets, **{f"command {number}": (one.stdout + one.stderr).encode()}) == []

    # Its files, and the syncer's own words: where they do not go to a terminal, they name the command for the link.
    files = {
        str(path): path.read_bytes()
        for path in run.folder.rglob("*")
        if path.is_file() and keys.path not in path.parents
    }
    assert {"run.toml", "events.jsonl", "report.html", "summary.json", "learner-0.log"} <= {
        Path(name).name for name in files
    }
    assert leaks(secrets, **files) == []
    assert "atoll tokens --keys" in run.stdout
    assert leaks(secrets, stdout=run.stdout.encode(), stderr=run.stderr.encode()) == []


LATE = """
import torch, atoll
model = torch.nn.Linear(2, 1)
with atoll.Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), join_wait_s=20):
    pass
"""


def test_a_link_with_another_fingerprint_is_refused_in_one_line(run: Run) -> None:
    """Its second address is that of a standby, which does not answer."""
    keys = KeyDir(run.folder / "keys")
    assert run.command("cert", "--out", keys.path).returncode == 0
    run.start("syncer", "--out", run.out, "--keys", keys.path, "--bind", "127.0.0.1", "--port", "0", "--learners", "1")
    run.address()
    address = parse_address(run.command("tokens", "--keys", keys.path, "link", "join").stdout.strip(), {})
    urls = (*address.urls, f"https://127.0.0.1:{run.free_port()}")
    link = SyncerAddress(urls=urls, run=address.run, token=address.token, pin="ab" * 32).link()
    (run.folder / "late.py").write_text(LATE)
    for words in (("status", link), ("learn", "late.py", "--join", link, "--name", "learner-0")):
        done = run.command(*words)
        assert done.returncode == 2, done
        last = done.stderr.splitlines()[-1]
        assert last.startswith("atoll: ") and "somebody else answers there, or the link is old" in last, done.stderr
    run.interrupt()
    run.ended()
