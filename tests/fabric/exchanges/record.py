"""Records what a learner and a syncer of this version say to each other: `python tests/fabric/exchanges/record.py OUT`.

A real syncer on a free port of this machine; a real learner in a process of its own, with its courier, which gives the
first parameters, trains on leases, saves its part of a cut, falls silent for a while and ends with the run. Kept, in
the order in which the syncer saw them: the raw frames of both directions, and the bodies that the learner sent. Only
the hello is changed: the machine, the process and its proof are not those of whoever recorded it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

import msgspec
from aiohttp import web

from atoll.config import convert
from atoll.fabric.control import ControlServer
from atoll.fabric.intake import Intake, ReceivedBody
from atoll.fabric.wire import decode_from_learner, encode
from atoll.protocol import messages
from atoll.protocol.settings import Settings
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import acquire
from atoll.syncer.run_store import RunStore
from atoll.syncer.service import SyncerService
from atoll.telemetry.events import EventLog

CONFIG: dict[str, Any] = {
    "protocol": {
        "learners": 1,
        "fragments": 2,
        "sync_every": 2,
        "overlap": 1,
        "codec": "fp32",
        "steps": 8,
        "cut_every": 4,
        "quorum_policy": "minimum",
    },
    "outer": {"merge": "mean", "optimizer": "sgd", "lr": 1.0, "momentum": 0.0},
}
SCRIPT = """
import time
import torch
import atoll

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with atoll.Learner(model, optimizer) as learner:
    for batch in learner.batches(torch.randn(64, 2), batch_size=4):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(1.3 if learner.steps == 3 else 0.1)
        learner.step(tokens=batch.numel())
"""


class Recorder:
    def __init__(self) -> None:
        self.kept: list[dict[str, str]] = []

    def listen(self) -> None:
        frame, send, receive, kept = ControlServer._frame, ControlServer._send, Intake.receive, self.kept

        async def heard(control: ControlServer, socket: web.WebSocketResponse, *rest: Any) -> bytes:
            data = await frame(control, socket, *rest)
            kept.append({"from": "learner", "frame": of_nobody(data).hex()})
            return data

        async def said(control: ControlServer, socket: web.WebSocketResponse, data: bytes) -> None:
            kept.append({"from": "syncer", "frame": data.hex()})
            await send(control, socket, data)

        async def came(intake: Intake, request: web.Request, learner: str, key: Any, into: memoryview) -> ReceivedBody:
            received = await receive(intake, request, learner, key, into)
            kept.append({"from": "learner", "put": request.path, "digest": received.digest, "body": bytes(into).hex()})
            return received

        ControlServer._frame, ControlServer._send, Intake.receive = heard, said, came  # type: ignore[method-assign]


def of_nobody(data: bytes) -> bytes:
    message = decode_from_learner(data)
    if isinstance(message, messages.Hello):
        return encode(msgspec.structs.replace(message, host="machine", pid=1, proof=32 * "0"))
    return data


async def recorded(folder: Path) -> list[dict[str, str]]:
    recorder = Recorder()
    recorder.listen()
    out, script = RunDir.create(folder / "run"), folder / "script.py"
    script.write_text(SCRIPT)
    run_store = RunStore(out, acquire(out.journal))
    events = EventLog(lambda line: None)
    service = SyncerService(convert(CONFIG, "the recording"), run="recorded", events=events, run_store=run_store)
    serving = asyncio.ensure_future(service.run(lambda parameters: None))
    await service.started.wait()
    env = {"ATOLL_SYNCER": f"http://127.0.0.1:{service.server.port}", "ATOLL_LEARNER": "learner-0"}
    env["ATOLL_FOLDER"] = str(folder / "learners")
    learner = await asyncio.create_subprocess_exec(sys.executable, str(script), env={**os.environ, **env})
    await asyncio.wait_for(serving, 60)
    assert await learner.wait() == 0
    run_store.close()
    return recorder.kept


def fields() -> dict[str, list[str]]:
    """Of every message, and of what messages hold."""
    kinds = (*get_args(messages.FromLearner), *get_args(messages.FromSyncer))
    parts = (messages.TensorSpec, messages.Range, messages.Member, Settings)
    return {kind.__name__: list(kind.__struct_encode_fields__) for kind in (*kinds, *parts)}


def main(path: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        kept = asyncio.run(recorded(Path(folder)))
    found = {"protocol": messages.PROTOCOL, "config": CONFIG, "fields": fields(), "exchange": kept}
    lines = [f"{json.dumps(name)}: {one_a_line(part)}" for name, part in found.items()]
    Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def one_a_line(part: Any) -> str:
    match part:
        case dict():
            return "{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(one)}" for name, one in part.items()) + "\n}"
        case list():
            return "[\n" + ",\n".join(f" {json.dumps(one)}" for one in part) + "\n]"
    return json.dumps(part)


if __name__ == "__main__":
    main(sys.argv[1])
