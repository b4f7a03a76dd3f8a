"""An S3 of this machine: moto's server as a process, and a front that can be told to fail."""

from __future__ import annotations

import http.client
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

BUCKET = "atoll"


def possible() -> bool:
    return find_spec("moto") is not None and find_spec("obstore") is not None


class LocalS3:
    """`front`: where clients go. While `failing` is above 0, that share of requests fails: by an answer of 503, by a
    connection that is closed, or by an answer that comes late."""

    def __init__(self, port: int) -> None:
        self.port, self.failing, self.refused = port, 0.0, 0
        self.down = False
        self.answering = threading.Event()
        """Not set: no request is answered."""
        self.answering.set()
        self.refuses: dict[str, tuple[int, str]] = {}
        """By method, the status and the code of S3 that every such request is answered with."""
        self._chance = random.Random(7)
        owner = self

        class Front(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                owner.answering.wait()
                if self.command in owner.refuses:
                    self._refuse(*owner.refuses[self.command])
                    return
                trouble = owner.draw_trouble()
                if trouble == "close":
                    self.close_connection = True
                    self.connection.close()
                    return
                if trouble == "error":
                    self.send_response(503)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                if trouble == "late":
                    time.sleep(2.0)
                upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
                upstream.request(self.command, self.path, body, headers)
                answer = upstream.getresponse()
                data = answer.read()
                upstream.close()
                if trouble == "lost":  # done, and nobody hears of it
                    self.close_connection = True
                    self.connection.close()
                    return
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("content-length", "connection", "transfer-encoding", "date", "server"):
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            def _refuse(self, status: int, code: str) -> None:
                text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/xml")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(text)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

            def log_message(self, format: str, *args: object) -> None:
                return

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                return  # a client that was killed

        self._server = Server(("127.0.0.1", 0), Front)
        self.front = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def draw_trouble(self) -> str:
        if self.down:
            self.refused += 1
            return "error"
        if self._chance.random() >= self.failing:
            return ""
        self.refused += 1
        return self._chance.choice(["error", "close", "late", "lost"])

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.front,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def close(self) -> None:
        self.answering.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def start_s3(log: Path) -> Iterator[LocalS3]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, "MOTO_ALLOW_NONEXISTENT_REGION": "1"}
        )
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            try:
                make = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
                urllib.request.urlopen(make, timeout=5).read()
                break
            except OSError:
                time.sleep(0.1)
        s3 = LocalS3(port)
        try:
            yield s3
        finally:
            s3.close()
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalS3]:
    with start_s3(tmp_path / "moto.log") as found:
        for name, value in found.environment().items():
            monkeypatch.setenv(name, value)
        yield found
