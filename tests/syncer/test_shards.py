"""A lead and its shards, each with its own folder and port, in one event loop: equal bits, kills, refusals."""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.syncer.conftest import WAIT_S, FakeLearner, Stage, plan

from atoll.digests import combine_digests, compute_digest
from atoll.fabric.bodies import BodyConnection
from atoll.fabric.local_secrets import publish_secrets, withdraw_secrets
from atoll.launch.resume import from_cut
from atoll.numerics import merge as merging
from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import Delta, body_nbytes, encode_contribution, make_codec
from atoll.numerics.shard_plan import ShardPlan, locate_bodies, make_shard_plan
from atoll.protocol.errors import ConfigError, PeerError
from atoll.protocol.messages import Announce, CutSaved, Ending, Pull, Refused, TensorSpec, Welcome
from atoll.protocol.records import MergedRecord
from atoll.protocol.shard import Shard
from atoll.store.cuts import CutState, digest_file, folder_of, read_state
from atoll.store.disk import LocalDisk
from atoll.store.journal import read, seal
from atoll.store.rundir import RunDir
from atoll.store.segments import follows, segment_path
from atoll.store.shards import ShardCut
from atoll.store.verify import verify_run
from atoll.store.writer_lease import acquire
from atoll.syncer.credentials import make_port_access
from atoll.syncer.service import SyncerService
from atoll.syncer.shard_service import ShardEnded, ShardService
from atoll.syncer.shard_store import ShardStore

WEIGHTS = [TensorSpec(f"layer-{n}.weight", (12 + n, 20), "float32") for n in range(6)]
TENSORS = (*WEIGHTS, TensorSpec("norm", (17,), "float32"))
FRAGMENTS = 2
NESTEROV = {"optimizer": "nesterov", "lr": 0.5, "momentum": 0.5}
ROBUST = {"robust": True, "merge": "rda-row", "optimizer": "nesterov", "lr": 0.5, "momentum": 0.5}


class ShardProcess:
    """A shard as its process runs it, without the process."""

    def __init__(self, stage: ShardedStage, shard: int) -> None:
        self.stage, self.shard = stage, shard
        self.out = RunDir(stage.out.path / "shards" / str(shard))
        self.task: asyncio.Task[ShardEnded] | None = None
        self.port = 0

    async def start(self, **other: Any) -> None:
        self.out.path.mkdir(parents=True, exist_ok=True)
        config = self.stage.config
        self.lease = acquire(self.out.journal)
        self.store = ShardStore(self.out, self.lease, self.shard)
        machine = Shard(other.get("shard", self.shard), other.get("shards", config.shards), secrets.token_hex(4))
        machine.run = self.store.run
        access = make_port_access(config, lambda: machine.run, secrets=self.out.secrets)
        self.service = ShardService(machine, self.store, self.stage.url, access, host="127.0.0.1", port=self.port)
        await self.service.server.start()
        self.port = self.service.server.port
        publish_secrets("127.0.0.1", self.port, access.secrets)
        self.service.url = f"http://127.0.0.1:{self.port}"
        self.task = asyncio.create_task(self.service.run())

    async def kill(self) -> None:
        """What is in memory is gone; what was handed to the disk stays."""
        assert self.task is not None
        await self.service.server.stop()
        self.task.cancel()
        await asyncio.wait([self.task])
        withdraw_secrets("127.0.0.1", self.port)
        self.store.close()


class ShardedStage(Stage):
    def __init__(self, path: Path, shards: int) -> None:
        super().__init__(path)
        self.count = shards
        self.shards = {n: ShardProcess(self, n) for n in range(2, shards + 1)}

    async def open(self, *arguments: Any, port: int = 0, **protocol: Any) -> SyncerService:
        settings = {"fragments": FRAGMENTS, "sync_every": FRAGMENTS, "quorum": 2, "cut_every": 4, "cut_wait_s": 0.2}
        service = await super().open({"shards": self.count, "port": port}, **{**settings, **protocol})
        self.config = service._config.service
        return service

    async def start_shards(self) -> None:
        for shard in self.shards.values():
            await shard.start()

    def join_sharded(self, name: str, codec: str = "fp32", version_codec: str = "fp32") -> ShardedLearner:
        learner = ShardedLearner(self.url, name, TENSORS, codec, version_codec)
        self.connect(learner)
        return learner

    async def end(self) -> None:
        for learner in self._learners:
            for one in learner.others if isinstance(learner, ShardedLearner) else ():
                await one.close()
        await super().end()

    def merged(self) -> list[MergedRecord]:
        lines = read(self.out.journal, disk=LocalDisk())
        return [record for _, record in lines if isinstance(record, MergedRecord)]


class ShardedLearner(FakeLearner):
    """Sends each shard its part, as a courier does."""

    def __init__(self, url: str, name: str, tensors: tuple[TensorSpec, ...], codec: str, version_codec: str) -> None:
        super().__init__(url, name, tensors)
        self.plan, self.codec, self.codecs = plan(tensors, FRAGMENTS), make_codec(codec), (codec, version_codec)
        self.versions, self.since, self.dropped = [-1] * FRAGMENTS, [0] * FRAGMENTS, [0] * FRAGMENTS
        self.others: list[BodyConnection] = []
        self.common = 0.0
        """How far its contributions point where those of the others do."""

    async def _ways(self) -> tuple[ShardPlan, list[BodyConnection]]:
        welcome = await self.until(Welcome)
        if not self.others:
            self.others = [BodyConnection(one) for one in welcome.shards]
        return make_shard_plan(self.plan, 1 + len(self.others), self.codecs), [self.link, *self.others]

    async def upload(self, value: float = 1.0, fragments: int | None = None) -> None:
        await self.until(Welcome, lambda welcome: welcome.upload)
        shards, ways = await self._ways()
        for part in self.plan.fragments:
            values = np.random.default_rng(part.index).normal(size=part.size).astype(np.float32)
            for place in shards.places(part.index):
                data = np.ascontiguousarray(values[place.values]).view(np.uint8).data
                way = ways[place.shard - 1]
                await way.put_initial(self.name, self.session, part.index, data, compute_digest(data), WAIT_S)

    async def body(self, pull: Pull, delta: float) -> str:
        shards, ways = await self._ways()
        part = self.plan.fragments[pull.fragment]
        draw = np.random.default_rng([pull.round, len(self.name), ord(self.name[-1])])
        shared = np.random.default_rng(pull.round).normal(size=part.size)
        values = (delta * (draw.normal(size=part.size) + self.common * shared)).astype(np.float32)
        body = np.empty(body_nbytes(self.codec, part), np.uint8)
        encode_contribution(self.codec, part, Delta(values, np.zeros_like(values)), body)
        digests = []
        for shard, slices in locate_bodies(self.codec, part, shards.places(part.index)):
            data = np.concatenate([body[one] for one in slices]).data
            digests.append(compute_digest(data))
            await ways[shard - 1].put_contribution(
                self.name, self.session, pull.round, pull.attempt, data, digests[-1], WAIT_S
            )
        return combine_digests(digests)

    async def fetch(self, fragment: int, version: int) -> FloatArray:
        shards, ways = await self._ways()
        values = np.empty(self.plan.fragments[fragment].size, np.float32)
        for place in shards.places(fragment):
            into = values[place.values].view(np.uint8).data
            found = -1
            async with asyncio.timeout(WAIT_S):
                while found < version:
                    found, _, _ = await ways[place.shard - 1].get_fragment(fragment, into, WAIT_S)
            assert found == version
        return values


@asynccontextmanager
async def sharded(path: Path, shards: int, **protocol: Any) -> AsyncIterator[ShardedStage]:
    stage = ShardedStage(path, shards)
    async with asyncio.TaskGroup() as tasks:
        stage._tasks = tasks
        await stage.open(**protocol)
        await stage.start_shards()
        yield stage
        if not stage.running.done():
            await stage.end()
        for shard in stage.shards.values():
            if shard.task is not None and not shard.task.cancelled():
                async with asyncio.timeout(WAIT_S):
                    await shard.task
                shard.store.close()
    stage.run_store.close()


async def begin(stage: ShardedStage, *codecs: str, names: tuple[str, ...] = ("a", "b")) -> list[ShardedLearner]:
    learners = []
    for name in names:
        learners.append(stage.join_sharded(name, *codecs))
        await learners[-1].begin()
    return learners


async def play(learners: list[ShardedLearner], first: int, rounds: int) -> None:
    """Everybody steps, is pulled and gives; every round is announced before the next."""
    for number in range(first, first + rounds):
        for one in learners:
            one.step()
        for one in learners:
            await one.contribute(await one.until(Pull, lambda pull, n=number: pull.round == n), 0.01)  # type: ignore[misc]
        for one in learners:
            await one.until(Announce, lambda said, n=number: said.round == n)  # type: ignore[misc]


async def make_ended_run(path: Path, shards: int) -> RunDir:
    """Five rounds; one of the last cycle, of the fragment of which learners have steps left; and the last cut, 7."""
    async with sharded(path, shards, outer=NESTEROV, cut_every=100, cut_wait_s=WAIT_S) as stage:
        learners = await begin(stage)
        await play(learners, 0, 5)
        stage.service.end("the test is over")
        for one in learners:
            await one.until(Ending)
            one.report(stopped=True)
        for one in learners:
            await one.contribute(await one.until(Pull, lambda pull: pull.round == 5), 0.01)
        for one in learners:
            await one.until(Announce, lambda said: said.round == 5)
            one.report(stopped=True)
        for one in learners:
            await one.until(Ending, lambda said: said.cut == 7)
            state = stage.out.learner(one.name) / "cut-000007.safetensors"
            state.write_text(f"the state of {one.name}")
            said = CutSaved(of=7, incarnation=1, t=one.t, file=state.name, digest=digest_file(state))
            assert one.link.send(said)
        await stage.until("cut")
    return stage.out


def outers_at(run: RunDir, cut: int) -> list[str]:
    """The outer optimizer of each part of the syncer in a cut."""
    _, lead = read_state(run.cuts, cut, CutState)
    others = [read_state(run.shard(n).cuts, cut, ShardCut)[1] for n in range(2, lead.history.begun.shards + 1)]
    return [str(outer["optimizer"]) for outer in (lead.history.outer, *(other.outer for other in others))]


@pytest.mark.parametrize("codecs", [("fp32", "fp32"), ("bf16", "fp32"), ("int4", "int4")], ids="/".join)
async def test_no_bit_depends_on_the_number_of_shards(tmp_path: Path, codecs: tuple[str, str]) -> None:
    found: list[dict[str, Any]] = []
    records: list[list[MergedRecord]] = []
    bodies: list[int] = []
    for count in (1, 2, 3):
        settings = {"codec": codecs[0], "version_codec": codecs[1]}
        async with sharded(tmp_path / str(count), count, **settings) as stage:
            learners = await begin(stage, *codecs)
            await play(learners, 0, 6)
            if codecs[1] == "fp32":
                values = await learners[0].fetch(1, 3)
                assert np.isfinite(values).all()
            await stage.end()
            assert stage.saved is not None
            found.append(stage.saved)
            records.append(stage.merged())
            bodies.append(stage.events("finished")[0]["bytes_in"])
        report = verify_run(stage.out.path)
        assert report.ok, report.problem
        assert report.facts["rebuilt_rounds"] > 0
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(np.array_equal(other[name].view(np.uint8), found[0][name].view(np.uint8)) for name in other)
    for one in records[1:]:
        assert [(r.round, r.marks, r.members) for r in one] == [(r.round, r.marks, r.members) for r in records[0]]
        assert all(len(r.heads) in (2, 3) for r in one)
    assert all(r.heads == () for r in records[0])
    assert min(bodies) > 0.8 * max(bodies), "those of all shards count; control messages are a little longer or shorter"


async def test_no_bit_depends_on_them_where_a_merge_needs_norms_of_whole_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a tensor lie in several shards, which tell each other their norms."""
    monkeypatch.setattr(merging, "PART", 60)
    found: list[dict[str, Any]] = []
    for count in (1, 2, 3):
        async with sharded(tmp_path / str(count), count, merge="rda") as stage:
            learners = await begin(stage)
            await play(learners, 0, 5)
            await stage.end()
            assert stage.saved is not None
            found.append(stage.saved)
            split = make_shard_plan(plan(TENSORS, FRAGMENTS), count)
            assert all(len(split.holders(n)) == count for n in range(FRAGMENTS))
        report = verify_run(stage.out.path)
        assert report.ok, report.problem
    for other in found[1:]:
        assert all(np.array_equal(other[name].view(np.uint8), found[0][name].view(np.uint8)) for name in other)


async def test_no_bit_depends_on_them_where_contributions_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The filter judges whole tensors, of which several shards hold rows: who points against the others is left out."""
    monkeypatch.setattr(merging, "PART", 60)
    found: list[dict[str, Any]] = []
    records: list[list[MergedRecord]] = []
    for count in (1, 2, 3):
        async with sharded(tmp_path / str(count), count, outer=ROBUST, learners=4, quorum=4) as stage:
            learners = await begin(stage, names=("a", "b", "c", "d"))
            for one in learners:
                one.common = 1.0
            learners[3].common = -1.0
            await play(learners, 0, 6)
            await stage.end()
            assert stage.saved is not None
            found.append(stage.saved)
            records.append(stage.merged())
        report = verify_run(stage.out.path)
        assert report.ok, report.problem
    factors = [np.frombuffer(share.factors, np.float32) for share in records[0][-1].members if share.factors]
    assert len(factors) == 1 and not factors[0].any(), "one of four is left out"
    for one in records[1:]:
        assert [(r.round, r.marks, r.members) for r in one] == [(r.round, r.marks, r.members) for r in records[0]]
    for other in found[1:]:
        assert all(np.array_equal(other[name].view(np.uint8), found[0][name].view(np.uint8)) for name in other)


async def test_a_lead_that_holds_nothing_of_a_fragment_judges_it_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fragment of one tensor that cannot be cut is held by one shard."""
    tensors = (TensorSpec("first", (40,), "float32"), TensorSpec("second", (40,), "float32"))
    monkeypatch.setitem(globals(), "TENSORS", tensors)
    async with sharded(tmp_path, 2, outer=ROBUST) as stage:
        split = make_shard_plan(plan(tensors, FRAGMENTS), 2)
        assert sorted(split.holders(n) for n in range(FRAGMENTS)) == [(1,), (2,)]
        learners = await begin(stage)
        await play(learners, 0, 4)
        await stage.end()
    report = verify_run(stage.out.path)
    assert report.ok, report.problem


@pytest.mark.parametrize("needs", [{"merge": "rda"}, {"outer": ROBUST}], ids=str)
async def test_a_shard_that_dies_while_norms_are_waited_for_costs_one_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs: dict[str, Any]
) -> None:
    monkeypatch.setattr(merging, "PART", 60)
    async with sharded(tmp_path, 2, **needs) as stage:
        learners = await begin(stage)
        await play(learners, 0, 2)
        silent, waits = stage.shards[2].service, asyncio.Event()
        monkeypatch.setattr(silent, "_tell_norms", lambda *norms: waits.set())
        for one in learners:
            one.step()
        for one in learners:
            await one.contribute(await one.until(Pull, lambda pull: pull.round == 2), 0.01)
        async with asyncio.timeout(WAIT_S):
            await waits.wait()
        for gathering in silent._gatherings.values():
            gathering.abandon()  # as the end of its process does
        await stage.shards[2].kill()
        await stage.until("alarm")
        await stage.shards[2].start()
        await stage.until("alarm", 2)
        for one in learners:
            await one.contribute(await one.until(Pull, lambda pull: pull.round == 2 and pull.attempt == 2), 0.01)
        for one in learners:
            await one.until(Announce, lambda said: said.round == 2)
        await stage.end()
    report = verify_run(stage.out.path)
    assert report.ok, report.problem


async def test_a_new_run_of_a_cut_has_the_parts_of_all_shards(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for count in (1, 2, 3):
        old, new = tmp_path / str(count), tmp_path / f"{count}-again"
        async with sharded(old, count) as stage:
            learners = await begin(stage)
            await play(learners, 0, 5)
            await stage.until("cut")
            await stage.end()
        from_cut(stage.out, 4, new / "run")
        async with sharded(new, count) as again:
            assert again.service.name != "r1"
            learner = again.join_sharded("c")
            welcome = await learner.until(Welcome)
            assert sum(welcome.versions) == 4
            assert np.isfinite(await learner.fetch(1, 2)).all()
            await again.end()
            assert again.saved is not None
            found.append(again.saved)
        report = verify_run(again.out.path)
        assert report.ok, report.problem
    for other in found[1:]:
        assert all(np.array_equal(other[name].view(np.uint8), found[0][name].view(np.uint8)) for name in other)


async def test_a_new_run_of_the_last_cut_looks_ahead_in_all_shards(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for count in (1, 2):
        old, new = tmp_path / str(count), tmp_path / f"{count}-again"
        ended, again = await make_ended_run(old, count), RunDir(new / "run")
        assert outers_at(ended, 7) == ["nesterov-last"] * count
        from_cut(ended, 7, again.path)
        assert outers_at(again, 7) == ["nesterov"] * count
        async with sharded(new, count, outer=NESTEROV) as stage:
            learners = [stage.join_sharded(name) for name in "cd"]
            for one in learners:
                one.versions = list((await one.until(Welcome)).versions)
                one.report()
            await play(learners, 7, 2)
            await stage.end()
            assert stage.saved is not None
            found.append(stage.saved)
        report = verify_run(again.path)
        assert report.ok, report.problem
    assert all(np.array_equal(found[0][name].view(np.uint8), found[1][name].view(np.uint8)) for name in found[0])


async def test_a_killed_shard_comes_back_with_everything_that_was_decided(tmp_path: Path) -> None:
    async with sharded(tmp_path, 2) as stage:
        learners = await begin(stage)
        await play(learners, 0, 3)
        await stage.shards[2].kill()
        await stage.until("alarm")
        await stage.shards[2].start()
        assert (await stage.until("alarm", 2))["replayed"] == 3
        await play(learners, 3, 3)  # and over a cut
        await stage.until("cut")
        await stage.shards[2].kill()
        await stage.until("alarm", 3)
        await stage.shards[2].start()
        assert (await stage.until("alarm", 4))["replayed"] == 2, "from cut 4 on"
        await play(learners, 6, 2)
        await stage.end()
    report = verify_run(stage.out.path)
    assert report.ok, report.problem
    assert report.facts["rounds"] >= 8


async def test_a_shard_reads_its_chain_from_its_newest_cut_on(tmp_path: Path) -> None:
    """A byte before that cut is not what it was, and nobody looks at it."""
    async with sharded(tmp_path, 2) as stage:
        learners = await begin(stage)
        await play(learners, 0, 5)
        await stage.until("cut")
        shard = stage.shards[2]
        await shard.kill()
        await stage.until("alarm")
        first, *_ = rounds = [position for position, _ in read(shard.out.journal, disk=LocalDisk())]
        _, cut = read_state(shard.out.cuts, 4, ShardCut)
        assert first.offset < cut.position.offset - 40 and cut.position in rounds[:-1]
        change_byte(segment_path(shard.out.journal, 1), cut.position.offset - 20)
        await shard.start()
        assert (await stage.until("alarm", 2))["replayed"] == 1
        await play(learners, 5, 1)
        await stage.end()
    change_byte(segment_path(shard.out.journal, 1), cut.position.offset - 20)
    report = verify_run(stage.out.path)
    assert report.ok, report.problem


async def test_a_shard_passes_over_a_cut_that_cannot_be_read(tmp_path: Path) -> None:
    """To find the end of its chain; which cut it comes back from is for the lead to say."""
    async with sharded(tmp_path, 2) as stage:
        learners = await begin(stage)
        await play(learners, 0, 5)
        await stage.until("cut")
        shard = stage.shards[2]
        await shard.kill()
        end = seal(shard.out.journal, disk=LocalDisk())
        change_byte(folder_of(shard.out.cuts, 4) / "state.bin", 3)
        lease = acquire(shard.out.journal)
        store = ShardStore(shard.out, lease, 2)
        assert follows(shard.out.journal, lease.term, LocalDisk()) == end
        store.close()
        change_byte(folder_of(shard.out.cuts, 4) / "state.bin", 3)
        await shard.start()
        await stage.until("alarm", 2)
        await stage.end()


async def test_a_shard_whose_disk_lost_a_confirmed_round_says_so_and_a_copy_of_its_folder_goes_on(
    tmp_path: Path,
) -> None:
    """As after a power loss on a disk that keeps neither what it has synced nor the mark of its end."""
    async with sharded(tmp_path, 2) as stage:
        learners = await begin(stage)
        await play(learners, 0, 3)
        shard = stage.shards[2]
        await shard.kill()
        await stage.until("alarm")
        whole = tmp_path / "copy"
        shutil.copytree(shard.out.path, whole)
        *_, before, _ = [position for position, _ in read(shard.out.journal, disk=LocalDisk())]
        with segment_path(shard.out.journal, before.term).open("r+b") as segment:
            segment.truncate(before.offset)
        shutil.rmtree(shard.out.marks)
        await shard.start()
        assert shard.task is not None
        async with asyncio.timeout(WAIT_S):
            ended = await shard.task
        said = "round 2 was decided, and the chain in .* does not hold shard 2's part of it: its disk lost what it had"
        assert ended.refused and re.match(said, str(ended)) and "\n" not in str(ended)
        assert "shard 2 cannot go on: round 2 was decided" in (await stage.until("alarm", 2))["text"]
        await shard.kill()
        for one in learners:
            one.step()
        shutil.rmtree(shard.out.path)
        whole.rename(shard.out.path)
        await shard.start()
        while not (back := stage.events("alarm")[-1])["over"]:
            await stage.until("alarm", len(stage.events("alarm")) + 1)
        assert back["replayed"] == 3 and len(stage.events("round")) == 3, "nothing was committed meanwhile"
        await play(learners, 3, 2)
        await stage.end()
    report = verify_run(stage.out.path)
    assert report.ok, report.problem


def change_byte(path: Path, offset: int) -> None:
    """Twice is as if never."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))


async def test_a_round_under_way_goes_on_when_its_shard_was_killed(tmp_path: Path) -> None:
    """One body had come, the others are asked for again."""
    async with sharded(tmp_path, 2) as stage:
        learners = await begin(stage)
        await play(learners, 0, 2)
        for one in learners:
            one.step()
        pulls = [await one.until(Pull, lambda pull: pull.round == 2) for one in learners]
        await learners[0].contribute(pulls[0], 0.01)
        await learners[1].contribute(pulls[1], 0.01)
        await stage.shards[2].kill()
        await stage.until("alarm")
        await stage.shards[2].start()
        await stage.until("alarm", 2)
        if not any(event["round"] == 2 for event in stage.events("round")):
            for one in learners:
                await one.contribute(await one.until(Pull, lambda pull: pull.round == 2 and pull.attempt == 2), 0.01)
            for one in learners:
                await one.until(Announce, lambda said: said.round == 2)
        await play(learners, 3, 2)
        await stage.end()
    report = verify_run(stage.out.path)
    assert report.ok and report.facts["passed"] <= FRAGMENTS, report.problem


async def test_nobody_is_let_in_before_every_shard_is_there(tmp_path: Path) -> None:
    stage = ShardedStage(tmp_path, 2)
    async with asyncio.TaskGroup() as tasks:
        stage._tasks = tasks
        await stage.open()
        early = stage.join_sharded("a")
        refused = await early.until(Refused)
        assert not refused.final and "shard 2 is not connected" in refused.reason
        await stage.start_shards()
        await early.until(Welcome)
        await stage.end()
    stage.run_store.close()


@pytest.mark.parametrize(
    ("other", "match"),
    [({"shards": 3}, "has 2 shards, not 3"), ({"shard": 3, "shards": 2}, "there is no shard 3")],
)
async def test_who_is_no_shard_of_this_run_ends_with_the_reason(
    tmp_path: Path, other: dict[str, int], match: str
) -> None:
    stage = ShardedStage(tmp_path, 2)
    async with asyncio.TaskGroup() as tasks:
        stage._tasks = tasks
        await stage.open()
        await stage.shards[2].start(**other)
        assert stage.shards[2].task is not None
        async with asyncio.timeout(WAIT_S):
            ended = await stage.shards[2].task
        assert ended.refused and match in str(ended)
        await stage.end()
    stage.run_store.close()
    stage.shards[2].store.close()


async def test_a_second_process_in_one_folder_is_refused(tmp_path: Path) -> None:
    async with sharded(tmp_path, 2) as stage:
        await stage.join_sharded("a").until(Welcome)
        with pytest.raises(ConfigError, match="is served by another syncer"):
            await ShardProcess(stage, 2).start()


async def test_a_new_lead_goes_on_with_shards_that_lived_on(tmp_path: Path) -> None:
    stage = ShardedStage(tmp_path, 2)
    async with asyncio.TaskGroup() as tasks:
        stage._tasks = tasks
        await stage.open()
        await stage.start_shards()
        learners = await begin(stage)
        await play(learners, 0, 5)
        port = stage.service.server.port
        await stage.service.server.stop()
        stage.running.cancel()
        await asyncio.wait([stage.running])
        stage.run_store.close()
        await stage.open(port=port)
        await stage.until("shard", 2)
        again = [stage.join_sharded(name) for name in ("c", "d")]
        for one in again:
            welcome = await one.until(Welcome)
            assert sum(welcome.versions) == 5
            values = await one.fetch(0, welcome.versions[0])
            assert np.isfinite(values).all()
        await stage.end()
        async with asyncio.timeout(WAIT_S):
            assert stage.shards[2].task is not None
            await stage.shards[2].task
    stage.run_store.close()
    stage.shards[2].store.close()
    report = verify_run(stage.out.path)
    assert report.ok, report.problem


@pytest.mark.parametrize("words", [["robust=true", "merge=rda"], ["guard=rollback"]], ids=str)
async def test_what_needs_whole_tensors_cannot_be_asked_for_later(tmp_path: Path, words: list[str]) -> None:
    async with sharded(tmp_path, 2) as stage:
        learner = stage.join_sharded("a")
        await learner.until(Welcome)
        with pytest.raises(PeerError, match="is for a syncer of one process, and shards = 2"):
            stage.service.operator.ask_to_change(words)
