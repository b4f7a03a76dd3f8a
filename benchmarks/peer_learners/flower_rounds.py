"""Two clients of Flower: `python flower_rounds.py ROWS ROUNDS HOW` prints what each round took.

One array of fp32, FedAvg, no evaluation, nothing on disk. HOW: `deployment` is the runtime that Flower documents, a
SuperLink, two SuperNodes and `flwr run`, all of it with its defaults; `stream` the older start_server and start_client
over one gRPC stream each, which Flower still has and calls deprecated.

A client gets the parameters when a round begins and trains within it, so it stands still from the end of one training
until the next begins: from the read of the parameters to the return of the mean into the model, in the next round.
The values differ everywhere and between the clients, because Flower sends what has the same digest only once.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

WIDTH = 4096
LIMIT_S = 280.0
APP = """[project]
name = "rounds"
version = "1.0.0"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "benchmark"

[tool.flwr.app.components]
serverapp = "flower_rounds:server_app"
clientapp = "flower_rounds:client_app"

[tool.flwr.app.config]
rows = {rows}
rounds = {rounds}
"""
LINK = '[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'


def make_values(rows: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, WIDTH), dtype=np.float32)


def train(came: np.ndarray, log: Path, number: int) -> np.ndarray:
    """Into the model, a pretended step, and out of it again; the log has when."""
    model = np.empty_like(came)
    model[:] = came
    ended = time.monotonic()
    model += 1e-3 * (number + 1)
    began = time.monotonic()
    read = model.copy()
    with log.open("a") as file:
        file.write(json.dumps({"adopted": ended, "began": began}) + "\n")
    return read


# ---- its deployment runtime: these two run in processes that Flower starts ------------------------------------------

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train_once(message: Message, context: Context) -> Message:
    number = int(context.node_config["number"])
    (came,) = message.content["arrays"].to_numpy_ndarrays()  # type: ignore[union-attr]
    read = train(came, Path(str(context.node_config["folder"])) / f"client-{number}", number)
    content = RecordDict({"arrays": ArrayRecord([read]), "metrics": MetricRecord({"num-examples": 1})})
    return Message(content=content, reply_to=message)


@server_app.main()
def serve_rounds(grid: Grid, context: Context) -> None:
    rows, rounds = int(context.run_config["rows"]), int(context.run_config["rounds"])
    strategy = FedAvg(fraction_evaluate=0.0)
    strategy.start(grid, ArrayRecord([make_values(rows)]), num_rounds=rounds + 1)


def deploy(rows: int, rounds: int, folder: Path) -> list[subprocess.Popen[bytes]]:
    app, (link, *nodes) = folder / "app", find_ports(3)
    app.mkdir()
    shutil.copy(__file__, app / "flower_rounds.py")
    (app / "pyproject.toml").write_text(APP.format(rows=rows, rounds=rounds))
    (folder / "config.toml").write_text(LINK.format(port=link))
    served = ["--insecure", "--disable-runtime-dependency-installation", "--port", str(link)]
    started = [start(folder, "flower-superlink", *served)]
    wait_for_port(link, started[0])
    for number, port in enumerate(nodes):
        told = f'number={number} folder="{folder}"'
        asked = ["--insecure", "--superlink", f"127.0.0.1:{link}", "--port", str(port), "--node-config", told]
        started.append(start(folder, "flower-supernode", *asked))
    with (folder / "output").open("ab") as output:
        asked = subprocess.run([*flower("flwr"), "run", str(app), "here"], stdout=output, stderr=output, check=False)
    if asked.returncode:
        stop(started)
    return started


# ---- the older way --------------------------------------------------------------------------------------------------


def stream(rows: int, rounds: int, folder: Path) -> list[subprocess.Popen[bytes]]:
    (port,) = find_ports(1)
    words = [str(rows), str(rounds), str(folder), str(port)]
    server = start(folder, sys.executable, __file__, "serve", *words)
    wait_for_port(port, server)
    return [server, *(start(folder, sys.executable, __file__, role, *words) for role in ("0", "1"))]


def play(role: str, rows: int, rounds: int, folder: Path, address: str) -> None:
    from flwr.client import NumPyClient, start_client
    from flwr.common import ndarrays_to_parameters
    from flwr.server import ServerConfig, start_server
    from flwr.server.strategy import FedAvg as OlderFedAvg

    class OneArray(NumPyClient):
        def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[list[np.ndarray], int, dict]:
            return [train(parameters[0], folder / f"client-{role}", int(role))], 1, {}

    if role == "serve":
        values = ndarrays_to_parameters([make_values(rows)])
        strategy = OlderFedAvg(fraction_evaluate=0.0, min_evaluate_clients=0, initial_parameters=values)
        start_server(server_address=address, config=ServerConfig(num_rounds=rounds + 1), strategy=strategy)
    else:
        start_client(server_address=address, client=OneArray().to_client(), insecure=True)


# ---- both -----------------------------------------------------------------------------------------------------------


def flower(program: str) -> list[str]:
    return [str(Path(sys.executable).parent / program)]


def find_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def start(folder: Path, program: str, *words: str) -> subprocess.Popen[bytes]:
    command = [*flower(program), *words] if program.startswith("flower") else [program, *words]
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


def wait_for_port(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while server.poll() is None and time.monotonic() < deadline:
        with socket.socket() as tried:
            if not tried.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.1)


def stop(started: Sequence[subprocess.Popen[bytes]]) -> None:
    for one in started:
        one.send_signal(signal.SIGTERM)
    for one in started:
        try:
            one.wait(20)
        except subprocess.TimeoutExpired:
            one.kill()


def wait_for_rounds(folder: Path, rounds: int, started: Sequence[subprocess.Popen[bytes]]) -> list[list[dict]]:
    """A round ends in a client when the parameters of the next one are in its model."""
    deadline, logs = time.monotonic() + LIMIT_S, [folder / f"client-{number}" for number in range(2)]
    while True:
        over = time.monotonic() > deadline or any(one.poll() is not None for one in started)
        found = [one.read_text().splitlines() if one.exists() else [] for one in logs]
        if min(map(len, found)) > rounds:
            break
        if over:
            said = " | ".join((folder / "output").read_text().splitlines()[-5:])
            raise SystemExit(f"Flower made {min(map(len, found))} of {rounds + 1} rounds: {said}")
        time.sleep(0.1)
    return [join([json.loads(line) for line in one]) for one in found]


def join(log: Sequence[dict]) -> list[dict]:
    rounds = [{"began": one["began"], "ended": after["adopted"]} for one, after in pairwise(log)]
    return [one | dict.fromkeys(("held_s", "longest_s"), one["ended"] - one["began"]) for one in rounds]


def main() -> None:
    if len(sys.argv) > 4:
        role, rows, rounds, folder, port = sys.argv[1:]
        return play(role, int(rows), int(rounds), Path(folder), f"127.0.0.1:{port}")
    rows, rounds, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    with tempfile.TemporaryDirectory(dir=os.environ.get("ATOLL_SCRATCH")) as scratch:
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # SuperNodes start others by name
        os.environ |= {"FLWR_HOME": scratch, "FLWR_TELEMETRY_ENABLED": "0", "PATH": programs}
        started = (deploy if how == "deployment" else stream)(rows, rounds, Path(scratch))
        try:
            print(json.dumps(wait_for_rounds(Path(scratch), rounds, started)))
        finally:
            stop(started)


if __name__ == "__main__":
    main()
