"""Instructions that the syncer spends on a control message: a count shows a small loss, on a busy machine too.

    python benchmarks/instructions.py            # compares with results/instructions.json: some minutes
    python benchmarks/instructions.py --write    # records the result

A child process plays the recorded stream (recorded_messages.py) to the syncer that ships: its service with its control
server, state machine, effect queue, journal, cuts and merges, in one process. Only the sockets are played, threads
work at once, and time is virtual. Bodies have a few values and their kernels run as plain Python, as in the tests:
what is counted is the work on messages. callgrind counts two children, of which one stops after the first messages:
the difference is free of start-up, imports and the beginning of the run.

Exit code 1: more than 3 % above the committed result, on the same Python and architecture and with the same stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import selectors
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import msgspec
from aiohttp import WSMessage, WSMsgType, web
from gates import judge
from multidict import CIMultiDict
from recorded_messages import MESSAGES, STREAM, Frame, Stream, make_body, read_stream
from seeds import find_commit

sys.path.append(str(Path(__file__).parents[1] / "tests" / "startup"))
from plain_loops import run_plain

from atoll.config import convert
from atoll.digests import compute_digest
from atoll.fabric.authorizer import VISITOR
from atoll.fabric.control import UnopenedChannel
from atoll.numerics.compiled import Kernel
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import acquire
from atoll.syncer.run_store import RunStore
from atoll.syncer.service import SyncerService
from atoll.telemetry.events import EventLog

ROOT = Path(__file__).resolve().parent.parent
RESULT = Path(__file__).parent / "results" / "instructions.json"
FIRST = 1000
"""Messages of the shorter child: by then the run has begun and every learner trains."""
PACKAGES = ("msgspec", "numpy", "aiohttp")


# ---- the child: a syncer in virtual time ----------------------------------------------------------------------------


class InstantSelector(selectors.DefaultSelector):
    """Lets virtual time pass where an event loop would wait."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing will ever happen again")
        self.loop.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes as soon as nothing is left to do."""

    now = 0.0

    def __init__(self) -> None:
        selector = InstantSelector()
        selector.loop = self
        super().__init__(selector)
        self.set_default_executor(InlineExecutor())

    def time(self) -> float:
        return self.now


class InlineExecutor(ThreadPoolExecutor):
    """Works at once, so that the same instructions follow each other every time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class PlayedRequest(dict[Any, Any]):
    """A learner's request for a control channel, with the attributes of `web.Request` that the server reads."""

    def __init__(self, secret: str) -> None:
        super().__init__()
        self.headers = CIMultiDict({"Authorization": f"Bearer {secret}"})
        self.path, self.remote, self.transport = "/v1/control", "127.0.0.1", None


class PlayedSocket:
    """The syncer's end of a WebSocket whose frames are recorded."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[WSMessage] = asyncio.Queue()

    async def receive(self) -> WSMessage:
        return await self.frames.get()

    def bring(self, data: bytes) -> None:
        self.frames.put_nowait(WSMessage(WSMsgType.BINARY, data, None))

    async def send_bytes(self, data: bytes) -> None:
        pass

    async def ping(self, data: bytes = b"") -> None:
        self.frames.put_nowait(WSMessage(WSMsgType.PONG, data, None))

    async def close(self, *, code: int = 1000, message: bytes = b"") -> bool:
        self.frames.put_nowait(WSMessage(WSMsgType.CLOSE, code, message.decode()))
        return True

    def break_off(self) -> None:
        self.frames.put_nowait(WSMessage(WSMsgType.CLOSED, None, None))


class Player:
    """Brings a stream to a syncer, each frame at its moment."""

    def __init__(self, service: SyncerService, tasks: asyncio.TaskGroup) -> None:
        self._service, self._tasks = service, tasks
        self._control = service.server._control
        self._sockets: dict[str, PlayedSocket] = {}
        """The newest of each learner."""
        self._bodies = {index: make_body(index) for index in range(service._config.protocol.fragments)}
        self._digests = {index: compute_digest(memoryview(body)) for index, body in self._bodies.items()}
        self._secret = service._access.secrets["learner"]

    async def play(self, stream: Stream, messages: int) -> int:
        """Return how many messages were brought: as many as asked, where the stream has them."""
        loop = asyncio.get_running_loop()
        brought, begins_at = 0, loop.time()
        hello_tag = msgspec.msgpack.encode("Hello")
        for frame in stream.frames:
            # Never two at one moment: time passes only once all that the frame before led to is done.
            await asyncio.sleep(max(1e-6, begins_at + frame.at_ms / 1000 - loop.time()))
            if frame.initial:
                await self._bring_initial(frame)
            elif not frame.data:
                self._sockets[frame.learner].break_off()
            else:
                if frame.body is not None:
                    self._bring_body(frame.learner, *frame.body)
                if hello_tag in frame.data[:16]:
                    self._connect(frame.learner)
                self._sockets[frame.learner].bring(frame.data)
                brought += 1
                if brought == messages:
                    break
        await asyncio.sleep(1e-6)
        return brought

    def _connect(self, learner: str) -> None:
        socket, request = PlayedSocket(), cast(web.Request, PlayedRequest(self._secret))
        request[VISITOR] = self._control._authorizer.admit(request)
        unopened = UnopenedChannel(self._control._unopened, request)
        self._sockets[learner] = socket
        self._tasks.create_task(self._control._talk(request, socket, unopened))  # type: ignore[arg-type]

    async def _bring_initial(self, frame: Frame) -> None:
        for part in self._service._require_begun().parameters.plan.fragments:
            body = self._service.expect_initial(frame.learner, frame.initial, part.index)
            body[:] = bytes(body.nbytes)
            digest = compute_digest(body)
            await self._service.initial_arrived(frame.learner, frame.initial, part.index, body, digest)

    def _bring_body(self, learner: str, round: int, attempt: int, fragment: int) -> None:
        body = self._bodies[fragment]
        self._service.expect_contribution(learner, "", round, attempt, len(body))[:] = body
        self._service.contribution_arrived(learner, round, attempt, self._digests[fragment])


async def play_to_syncer(folder: Path, messages: int) -> NoReturn:
    """Play the beginning of the stream to a syncer, print what came of it, and end this process."""
    stream = read_stream()
    config = convert({"protocol": msgspec.to_builtins(stream.settings)}, "the recorded stream")
    out = RunDir.create(folder)
    run_store = RunStore(out, acquire(out.journal), keep=config.protocol.keep_cuts)
    loop = asyncio.get_running_loop()
    with closing(EventLog(lambda line: None, loop.time)) as events:
        service = SyncerService(config, run="run", events=events, run_store=run_store)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(service.run(lambda tensors: None))
            await service.started.wait()
            brought = await Player(service, tasks).play(stream, messages)
            machine = service._require_begun().machine
            played = {"messages": brought, "rounds": machine.committed, "bad_frames": service.server.bad_frames}
            print(json.dumps(played), flush=True)
            os._exit(0)  # without the end of the run, which is no work on messages
    raise AssertionError("the process has ended")


def run_child(messages: int) -> NoReturn:
    """Play so many messages in this process."""
    if hasattr(os, "sched_setaffinity"):  # one core: kernels have no threads
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    Kernel.__call__ = run_plain  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as scratch, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(play_to_syncer(Path(scratch) / "run", messages))
    raise AssertionError("the process has ended")


# ---- the count ------------------------------------------------------------------------------------------------------


class Count(NamedTuple):
    instructions: int
    messages: int
    rounds: int


def count_child(messages: int) -> Count:
    """Count the instructions of a child that plays so many messages."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", "--trace-children=no"]
    command += [sys.executable, str(Path(__file__)), "--play", str(messages)]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT / "src"), "OPENBLAS_NUM_THREADS": "1"}
    # Nobody is dialled: without certificates OpenSSL uses no instructions that valgrind may not know.
    environment |= {"SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": os.devnull}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    collected = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or collected is None:
        raise SystemExit(f"callgrind did not count: {done.stderr[-2000:]}")
    played = json.loads(done.stdout)
    if played["bad_frames"]:
        raise SystemExit("the syncer refuses messages of the stream: record it anew (recorded_messages.py)")
    return Count(int(collected[1]), played["messages"], played["rounds"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, help="play so many (default: as the committed result)")
    parser.add_argument("--write", action="store_true", help="record the result")
    parser.add_argument("--play", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        run_child(options.play)
    if shutil.which("valgrind") is None:
        print("not counted: valgrind is not installed")
        return 0
    messages = options.messages or (json.loads(RESULT.read_text())["messages"] if RESULT.exists() else MESSAGES)
    first, all = count_child(FIRST), count_child(messages)
    per_message = (all.instructions - first.instructions) / (all.messages - first.messages)
    result: dict[str, Any] = {
        "commit": find_commit(),
        "arch": platform.machine(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "stream": compute_digest(memoryview(STREAM.read_bytes())),
        "messages": all.messages,
        "rounds": all.rounds,
        "instructions": {"per_message": round(per_message)},
    }
    if options.write:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return judge(result, RESULT, {"instructions": result["instructions"]}, "arch", "versions", "stream", "messages")


if __name__ == "__main__":
    raise SystemExit(main())
