from __future__ import annotations

import asyncio
import socket
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import aiohttp
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.syncer.conftest import TENSORS, WAIT_S, FakeLearner, Stage

from atoll.digests import compute_digest
from atoll.fabric.address import parse_address
from atoll.fabric.local_secrets import secret_for
from atoll.fabric.transfer import get_fragment_once, get_json, post_drain, post_score, post_settings
from atoll.fabric.wire import ScoreReport
from atoll.numerics.codec import make_codec
from atoll.numerics.screen import UsualNorms
from atoll.protocol.effects import Tick
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import (
    Announce,
    Contribution,
    Drain,
    Ending,
    Leave,
    Pull,
    Recover,
    Refused,
    Started,
    TensorSpec,
    Welcome,
)
from atoll.protocol.records import ChangedRecord, TailRecord
from atoll.store.disk import LocalDisk
from atoll.store.journal import read
from atoll.store.verify import verify_run
from atoll.syncer import operator
from atoll.syncer.versions import OLD


def url(stage: Stage) -> str:
    return f"http://127.0.0.1:{stage.service.server.port}"


async def one_at_work(stage: Stage, **settings: object) -> tuple[FakeLearner, Pull]:
    """A learner that gave the first parameters (all 1), made a step and is asked for a fragment."""
    await stage.open(learners=1, **settings)
    learner = stage.join("a")
    await learner.begin(1.0)
    return learner, await next_pull(learner)


async def next_pull(learner: FakeLearner, after: Pull | None = None) -> Pull:
    seen = (after.round, after.attempt) if after else (-1, 0)
    async with asyncio.timeout(WAIT_S):
        while True:
            learner.step()
            for message in learner.heard:
                if isinstance(message, Pull) and (message.round, message.attempt) > seen:
                    return message
            await asyncio.sleep(0.01)


# ---- joining ------------------------------------------------------------------------------------------------------


async def test_a_model_that_differs_is_refused_by_name_and_the_run_goes_on(stage: Stage) -> None:
    await stage.open()
    first = stage.join("a")
    await first.begin()
    odd = stage.join("b", (TENSORS[0], TensorSpec("two", (2, 3), "float32")))
    refused = await odd.until(Refused)
    assert refused.final
    assert "'two' is (2, 3) here, (2, 2) in the run" in refused.reason and "run.toml" in refused.reason
    assert stage.events("refused")[0]["learner"] == "b"
    third = stage.join("c")
    assert not (await third.until(Welcome)).upload


async def test_more_fragments_than_rows_is_refused_with_the_fix(stage: Stage) -> None:
    await stage.open(fragments=6, sync_every=6)
    refused = await stage.join("a").until(Refused)
    assert "6 fragments" in refused.reason and "5 at most, its rows" in refused.reason
    assert "fragments" in stage.events("refused")[0]["text"]


async def test_a_model_that_no_memory_holds_is_refused_and_begins_nothing(stage: Stage) -> None:
    await stage.open(fragments=1)
    huge = tuple(TensorSpec(f"w{number}", (2**24, 2**24), "float32") for number in range(64))
    assert "does not fit into this syncer's memory" in (await stage.join("a", huge).until(Refused)).reason
    assert (await stage.join("b").until(Welcome)).upload


@pytest.mark.parametrize("version", [0, 1, 3])
async def test_an_unknown_protocol_version_is_refused(stage: Stage, version: int) -> None:
    await stage.open()
    refused = await stage.join("a", protocol=version).until(Refused)
    assert "install the same version" in refused.reason


async def test_first_parameters_that_are_not_finite_are_refused_and_the_next_is_asked(stage: Stage) -> None:
    await stage.open()
    broken, sound = stage.join("a"), None
    await broken.until(Welcome)
    sound = stage.join("b")
    assert not (await sound.until(Welcome)).upload
    await broken.upload(float("nan"), fragments=1)
    assert "not finite" in (await broken.until(Refused)).reason
    await sound.upload(2.0)
    await sound.until(Started)
    values = np.empty(4, dtype=np.float32)
    await get_fragment_once(url(stage), 0, values.view(np.uint8).data[: 4 * sound.plan.fragments[0].size], WAIT_S)
    assert values[0] == 2.0


async def test_what_a_dead_uploader_sent_is_worth_nothing(stage: Stage) -> None:
    await stage.open()
    first = stage.join("a")
    await first.upload(7.0, fragments=1)
    second = stage.join("b")
    await second.until(Welcome)
    await first.link.close()
    await second.upload(2.0)
    await second.until(Started)
    for part in second.plan.fragments:
        values = np.empty(part.size, dtype=np.float32)
        await get_fragment_once(url(stage), part.index, values.view(np.uint8).data, WAIT_S)
        assert (values == 2.0).all()


async def test_what_one_that_is_asked_no_more_still_sends_is_written_nowhere(stage: Stage) -> None:
    """Its body is under way when the next is asked; it ends, and changes nothing of what the next has sent."""
    service = await stage.open()
    first, second = stage.join("a"), None
    await first.until(Welcome)
    body = service.expect_initial("a", first.session, 0)
    second = stage.join("b")
    await second.until(Welcome)
    assert service._machine is not None
    service._machine.run_start._upload._since = -1e9
    service._handle(Tick())
    await second.upload(2.0)
    await second.until(Started)
    body[:] = bytes(len(body))
    with pytest.raises(PeerError, match="a is not asked for the first parameters any more"):
        await service.initial_arrived("a", first.session, 0, body, "")
    for part in second.plan.fragments:
        values = np.empty(part.size, dtype=np.float32)
        await get_fragment_once(url(stage), part.index, values.view(np.uint8).data, WAIT_S)
        assert (values == 2.0).all()


async def test_a_body_of_the_process_that_had_the_name_before_is_no_part_of_version_0(stage: Stage) -> None:
    service = await stage.open()
    first = stage.join("a")
    await first.until(Welcome)
    body = service.expect_initial("a", first.session, 0)
    await first.link.close()
    second = stage.join("a", process=2)
    await second.until(Welcome)
    with pytest.raises(PeerError, match="a is not asked for the first parameters any more"):
        await service.initial_arrived("a", first.session, 0, body, "")
    await second.upload(2.0)
    await second.until(Started)


async def test_bodies_of_processes_that_came_and_went_leave_no_memory_behind(stage: Stage) -> None:
    """Each begins to send the first parameters, and is followed by another process of its name."""
    service = await stage.open()
    kept = []
    for process in range(5):
        learner = stage.join("a", process=process)
        await learner.until(Welcome)
        kept.append(weakref.ref(service.expect_initial("a", learner.session, 0).obj))  # type: ignore[arg-type]
        await learner.link.close()
    assert [one() for one in kept] == [None] * 5


async def test_bodies_of_names_that_are_asked_no_more_are_cut_off(stage: Stage) -> None:
    """Each name begins to send all of the first parameters, hangs up, and keeps the bodies open."""
    intake, held = (await stage.open(learners=4)).server._intake, []
    for number in range(6):
        learner = stage.join(f"evil-{number}")
        await learner.until(Welcome, lambda welcome: welcome.upload)
        bodies = [await begin_initial(stage, learner, part.index) for part in learner.plan.fragments]
        async with asyncio.timeout(WAIT_S):
            for before in held:
                assert await answer_of(*before) == b"", "it was not cut off"
            while set(intake._under_way_of) != {learner.name}:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        assert intake._under_way <= 4 * learner.plan.size
        held = bodies
        await learner.link.close()
    await stage.join("honest").begin()
    for reader, writer in held:
        writer.close()
        await answer_of(reader, writer)


async def answer_of(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """All that is said until the connection is closed."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def begin_initial(
    stage: Stage, learner: FakeLearner, fragment: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A body that lacks its last byte."""
    port, size = stage.service.server.port, 4 * learner.plan.fragments[fragment].size
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = [
        f"PUT /v1/initial/{learner.name}/{fragment} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {secret_for('127.0.0.1', port, '/v1/control')}",
        f"Atoll-Session: {learner.session}",
        f"Content-Length: {size}",
    ]
    writer.write("\r\n".join([*head, "", ""]).encode() + bytes(size - 1))
    return reader, writer


async def test_nobody_else_may_send_first_parameters(stage: Stage) -> None:
    await stage.open()
    await stage.join("a").until(Welcome)
    other = stage.join("b")
    await other.until(Welcome)
    data = np.ones(4, dtype=np.float32)[: other.plan.fragments[0].size].view(np.uint8).data
    with pytest.raises(PeerError, match="b was not asked for the first parameters"):
        await other.link.put_initial("b", other.session, 0, data, compute_digest(data), WAIT_S)


async def test_bytes_of_the_first_parameters_are_told_while_they_arrive(stage: Stage) -> None:
    await stage.open()
    uploader = stage.join("a")
    await uploader.until(Welcome)
    assert "sends the first parameters" not in stage.service.figures().notice
    sizes = [4 * part.size for part in uploader.plan.fragments]
    values = np.ones(sizes[0] // 4, dtype=np.float32).view(np.uint8).data
    await uploader.link.put_initial("a", uploader.session, 0, values, compute_digest(values), WAIT_S)
    arrived, whole = f"{sizes[0] / 1e6:.3g}", f"{sum(sizes) / 1e6:.3g}"
    assert f"a sends the first parameters: {arrived} of {whole} MB" in stage.service.figures().notice
    rest = np.ones(sizes[1] // 4, dtype=np.float32).view(np.uint8).data
    await uploader.link.put_initial("a", uploader.session, 1, rest, compute_digest(rest), WAIT_S)
    assert "sends the first parameters" not in stage.service.figures().notice


# ---- contributions ------------------------------------------------------------------------------------------------


async def test_a_contribution_becomes_the_next_version(stage: Stage) -> None:
    learner, pull = await one_at_work(stage)
    await learner.contribute(pull, 0.25)
    announced = await learner.until(Announce)
    assert (announced.version, announced.fragment) == (1, pull.fragment)
    values = np.empty(learner.plan.fragments[pull.fragment].size, dtype=np.float32)
    await get_fragment_once(url(stage), pull.fragment, values.view(np.uint8).data, WAIT_S)
    assert (values == 0.75).all()


async def test_a_nan_contribution_is_refused_three_times_over_and_the_parameters_stay_finite(stage: Stage) -> None:
    learner, pull = await one_at_work(stage)
    for strike in range(1, 4):
        await learner.contribute(pull, float("nan"))
        await stage.until("refused", strike)
        if strike < 3:
            pull = await next_pull(learner, pull)
    assert "not finite" in stage.events("refused")[0]["reason"]
    await learner.until(Recover)
    assert [e["learner"] for e in stage.events("quarantined")] == ["a"]
    await stage.end()
    assert stage.saved is not None and all((tensor == 1.0).all() for tensor in stage.saved.values())


@pytest.mark.parametrize(
    ("codec", "kind"),
    [("fp32", "refused"), ("bf16", "refused"), ("int8", "round"), ("int4", "round"), ("topk", "round")],
)
async def test_one_step_as_large_as_the_longest_is_merged_where_it_may_be_feedback(
    stage: Stage, codec: str, kind: str
) -> None:
    learner, pull = await one_at_work(stage, codec=codec)
    learner.codec = make_codec(codec)
    stage.service.begun.screen.restore_norms(UsualNorms([[1e-3] * 16] * 2, [1e-3] * 2, [[1] * 15 + [48]] * 2))
    await learner.contribute(pull, 0.1, steps=1, tokens=8)
    await stage.until(kind)
    assert len(stage.events("refused", "round")) == 1


async def test_one_step_as_large_as_most_are_is_merged(stage: Stage) -> None:
    learner, pull = await one_at_work(stage)
    stage.service.begun.screen.restore_norms(UsualNorms([[1e-3] * 16] * 2, [1e-3] * 2, [[1] * 7 + [48] * 9] * 2))
    await learner.contribute(pull, 0.1, steps=1, tokens=8)
    await stage.until("round")
    assert not stage.events("refused")


async def test_a_body_that_is_not_the_one_its_message_names_is_refused(stage: Stage) -> None:
    learner, pull = await one_at_work(stage)
    await learner.contribute(pull, 0.5, digest="0" * 32)
    assert "not the one its message names" in (await stage.until("refused"))["reason"]


async def test_a_message_without_its_body_is_refused(stage: Stage) -> None:
    learner, pull = await one_at_work(stage)
    learner.body = lambda pull, delta: asyncio.sleep(0, "0" * 32)  # type: ignore[method-assign]
    await learner.contribute(pull, 0.5)
    assert "did not arrive" in (await stage.until("refused"))["reason"]


@pytest.mark.parametrize("fragment", [1, 7, -1])
async def test_a_message_that_names_another_fragment_is_refused(stage: Stage, fragment: int) -> None:
    learner, pull = await one_at_work(stage)
    assert pull.fragment == 0
    await learner.contribute(pull, 0.5, fragment=fragment)
    assert (await stage.until("refused"))["learner"] == "a"


async def test_a_body_of_the_wrong_size_is_refused(stage: Stage) -> None:
    learner, pull = await one_at_work(stage)
    data = np.zeros(99, dtype=np.uint8).data
    with pytest.raises(PeerError, match="99 bytes, this fragment needs exactly"):
        await learner.link.put_contribution(
            "a", learner.session, pull.round, pull.attempt, data, compute_digest(data), WAIT_S
        )


async def test_a_body_nobody_asked_for_is_refused(stage: Stage) -> None:
    learner, _ = await one_at_work(stage)
    data = np.zeros(4, dtype=np.uint8).data
    with pytest.raises(PeerError, match=r"no contribution to round 99 \(attempt 1\) is waited for"):
        await learner.link.put_contribution("a", learner.session, 99, 1, data, compute_digest(data), WAIT_S)


async def test_a_contribution_told_twice_counts_once(stage: Stage) -> None:
    """Two are asked, so that the first one's contribution waits for its merge when it is told again."""
    await stage.open(quorum=2)
    first, second = stage.join("a"), stage.join("b")
    await first.begin(1.0)
    await second.begin()
    pulls = await asyncio.gather(next_pull(first), next_pull(second))
    await first.contribute(pulls[0], 0.5)
    first.body = lambda pull, delta: asyncio.sleep(0, "0" * 32)  # type: ignore[method-assign]
    await first.contribute(pulls[0], 0.5)
    await second.contribute(pulls[1], 0.5)
    assert (await first.until(Announce)).version == 1
    assert not stage.events("refused")
    members = stage.events("round")[0]["members"]
    assert len(members) == 2 and [one["loss"] for one in members] == [1.5, 1.5]  # as they told it


# ---- people and evaluators ----------------------------------------------------------------------------------------


async def test_before_the_run_there_is_a_status_but_no_manifest_and_no_fragment(stage: Stage) -> None:
    await stage.open()
    status = await get_json(url(stage), "/v1/status")
    assert isinstance(status, dict) and (status["phase"], status["learners"]) == ("waiting", [])
    with pytest.raises(PeerError, match="has not begun"):
        await get_json(url(stage), "/v1/manifest")
    with pytest.raises(PeerError, match="the run has no parameters yet"):
        await get_fragment_once(url(stage), 0, memoryview(bytearray(4)))


async def test_a_score_is_an_event_and_a_figure(stage: Stage) -> None:
    await one_at_work(stage)
    await post_score(url(stage), ScoreReport(round=0, loss=2.5, cpu_s=0.5, sample="def ", final=False))
    event = await stage.until("score")
    assert (event["loss"], event["sample"]) == (2.5, "def ")
    status = await get_json(url(stage), "/v1/status")
    assert isinstance(status, dict) and (status["validation_loss"], status["validation_round"]) == (2.5, 0)


async def test_the_status_says_when_nobody_will_score_the_model(stage: Stage) -> None:
    await stage.open()
    assert stage.service.figures().scorer
    stage.service.unscored()
    assert not stage.service.figures().scorer


async def test_a_score_brings_metrics_in_the_words_of_the_script(stage: Stage) -> None:
    await one_at_work(stage)
    figures = {"metrics": {"accuracy": 0.91, "recall": None}, "directions": {"accuracy": "max"}}
    score = msgspec.convert({"round": 0, "loss": 2.5, "cpu_s": 0.5, "unit": "bits", **figures}, ScoreReport)
    await post_score(url(stage), score)
    event = await stage.until("score")
    assert event["text"] == "validation loss 2.5000, accuracy 0.91, recall is not finite at round 0"
    assert {name: event[name] for name in figures} == figures and event["unit"] == "bits"
    status = await get_json(url(stage), "/v1/status")
    assert isinstance(status, dict) and {name: status[name] for name in figures} == figures
    assert status["loss_unit"] == "bits"


async def test_a_scorer_without_a_loss_raises_no_alarm(stage: Stage) -> None:
    """A loss that is missing is not one that is not finite."""
    await one_at_work(stage)
    score = ScoreReport(round=0, loss=None, cpu_s=0.5, metrics={"accuracy": 0.91}, has_loss=False)
    await post_score(url(stage), score)
    event = await stage.until("score")
    assert event["text"] == "accuracy 0.91 at round 0"
    assert not stage.events("alarm")
    await post_score(url(stage), ScoreReport(round=0, loss=None, cpu_s=0.5))
    assert "not finite" in (await stage.until("alarm"))["text"]


async def test_the_end_saves_the_model_and_says_why(stage: Stage) -> None:
    await one_at_work(stage)
    await stage.end()
    assert stage.saved is not None and stage.saved["two"].shape == (2, 2)
    finished = stage.events("finished")[0]
    assert finished["reason"] == "the test is over"
    assert finished["bytes_in"] > 0 and finished["learners"][0]["learner"] == "a"


async def test_the_end_writes_the_mean_of_the_last_versions_behind_its_record(stage: Stage) -> None:
    learner, pull = await one_at_work(stage, service={"tail_average": 3})
    for number, delta in enumerate((0.5, 0.5, 0.25, 0.25, 0.125, 0.125)):
        await learner.contribute(pull, delta=delta)
        await stage.until("round", number + 1)
        pull = await next_pull(learner, after=pull)
    await stage.end()
    *_, record = (one for _, one in read(stage.out.journal, disk=LocalDisk()) if isinstance(one, TailRecord))
    assert (record.cycles, record.first, record.last) == (3, (1, 1), (3, 3))
    assert (load_file(stage.out.tail_model)["two"] == np.float32((0.5 + 0.25 + 0.125) / 3)).all()
    assert stage.events("closing")[-1]["text"] == "the mean of the last 3 cycles is in model-tail.safetensors"
    assert verify_run(stage.out.path).ok


async def test_where_there_is_no_mean_to_be_had_the_run_ends_all_the_same(stage: Stage) -> None:
    await one_at_work(stage, service={"tail_average": 3})
    await stage.end()
    assert stage.saved is not None and not stage.out.tail_model.exists()
    assert "no averaged model is written: no fragment of" in stage.events("warning")[-1]["text"]


async def test_an_end_before_any_learner_saves_nothing(stage: Stage) -> None:
    await stage.open()
    await stage.end()
    assert stage.saved is None
    assert stage.events("finished")[0]["reason"] == "the test is over"


def changes(stage: Stage) -> list[str]:
    """What the journal on disk has of them."""
    return [one.what for _, one in read(stage.out.journal, disk=LocalDisk()) if isinstance(one, ChangedRecord)]


async def ask_for(stage: Stage, lr: float) -> asyncio.Task[str]:
    """`atoll set`, until the syncer has decided it."""
    asking = asyncio.create_task(post_settings(url(stage), [f"outer_lr={lr}"]))
    async with asyncio.timeout(WAIT_S):
        while stage.service._require_begun().machine.history.outer["lr"] != lr:
            await get_json(url(stage), "/v1/status")
    return asking


async def test_a_change_of_settings_is_answered_once_it_is_durable(stage: Stage) -> None:
    await one_at_work(stage)
    with stage.run_store._writing:  # the disk does not answer
        first = await ask_for(stage, 0.5)
        second = await ask_for(stage, 0.25)
        await get_json(url(stage), "/v1/status")
        assert not first.done() and not second.done() and not changes(stage)
    assert (await first, await second) == ("outer_lr=0.5", "outer_lr=0.25")
    assert changes(stage) == ["outer_lr=0.5", "outer_lr=0.25"]
    assert await post_settings(url(stage), ["outer_lr=0.25"]) == "", "it is like that already"


async def test_a_change_that_waits_for_a_round_is_answered_when_it_is_made(stage: Stage) -> None:
    await one_at_work(stage)
    assert await post_settings(url(stage), ["sync_every=8"]) == "sync_every=8"
    assert changes(stage) == ["sync_every=8"]


async def test_a_change_that_takes_long_is_answered_as_asked_for(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    await one_at_work(stage)
    monkeypatch.setattr(operator, "ANSWER_S", 0.0)
    with stage.run_store._writing:
        said = await post_settings(url(stage), ["outer_lr=0.5"])
    assert said.startswith("outer_lr=0.5 (asked for: it holds once")


async def test_a_newcomer_with_weights_of_its_own_cannot_get_them_into_the_model(stage: Stage) -> None:
    """It tries everything an impatient learner could: a body nobody asked for, a contribution out of the blue, and a
    report that claims versions it never took."""
    learner, pull = await one_at_work(stage)
    newcomer = stage.join("b")
    welcome = await newcomer.until(Welcome)
    newcomer.t, newcomer.incarnation = 1000, welcome.incarnation
    with pytest.raises(PeerError, match="waited for"):
        await newcomer.body(pull, delta=-1e6)
    said = {"fragment": pull.fragment, "base": 0, "t": 1000, "steps": 1000, "tokens": 8000, "digest": "0" * 32}
    assert newcomer.link.send(Contribution(round=pull.round, attempt=pull.attempt, **said))
    newcomer.report()  # it holds nothing, and says so
    for number in range(3):
        await learner.contribute(pull, delta=0.25)
        event = await stage.until("round", number + 1)
        assert [member["learner"] for member in event["members"]] == ["a"]
        pull = await next_pull(learner, after=pull)
    assert not any(isinstance(message, Pull) for message in newcomer.heard), "it is not even asked"
    newcomer.versions = [10**6] * len(newcomer.versions)
    newcomer.report()
    await stage.until("lost")
    assert "versions that this run never committed" in stage.events("lost")[0]["text"]


async def test_the_event_of_a_round_has_the_autocorrelation_of_its_gradient(stage: Stage) -> None:
    learner, pull = await one_at_work(stage)
    found = []
    for number, delta in enumerate((0.25, 0.25, 0.5, -0.5)):
        await learner.contribute(pull, delta=delta)
        event = await stage.until("round", number + 1)
        found.append((event["fragment"], event["rho"], event["outer_step"]))
        pull = await next_pull(learner, after=pull)
    assert found == [(0, None, None), (1, None, None), (0, 1.0, 1.0), (1, -1.0, 1.0)], "SGD moves by η alone"
    status = stage.service.figures()
    assert (status.rho, status.outer_step, status.outer_lr) == (0.0, 1.0, 1.0)


# ---- draining -----------------------------------------------------------------------------------------------------


async def asked_to_leave(stage: Stage, learner: FakeLearner) -> asyncio.Task[str]:
    """`atoll drain`, until the learner has the request; its answer."""
    answer = asyncio.create_task(post_drain(url(stage), learner.name))
    assert (await learner.until(Drain)).reason == "the operator asked"
    return answer


async def test_a_drain_is_answered_once_its_learner_has_heard_of_it(stage: Stage) -> None:
    learner, _ = await one_at_work(stage)
    other = stage.join("b")
    await other.begin()
    with stage.run_store._writing:  # the disk does not answer: what is decided behind a record waits
        changing = await ask_for(stage, 0.5)
        answers = [asyncio.create_task(post_drain(url(stage), "a")) for _ in range(2)]
        await get_json(url(stage), "/v1/status")
        assert not any(isinstance(message, Drain) for message in learner.heard)
    await changing
    await learner.until(Drain)
    learner.report()
    await get_json(url(stage), "/v1/status")
    assert not any(answer.done() for answer in answers), "a syncer that dies now has asked nobody"
    learner.report(leaving=True)
    said = f"a is leaving: it stopped at step {learner.t}, and its last steps are collected"
    assert await asyncio.gather(*answers) == [said, said]
    assert await post_drain(url(stage), "a") == f"a is leaving already: it stopped at step {learner.t}"
    assert not any(isinstance(message, Drain) for message in other.heard)


async def test_one_that_goes_before_it_answers_is_told_of_with_its_reason(stage: Stage) -> None:
    """A newcomer leaves without a report; one that dies says so too, by its courier."""
    await stage.open()
    learner = stage.join("a")
    await learner.until(Welcome)
    answer = await asked_to_leave(stage, learner)
    learner.link.send(Leave(reason="its training process died"))
    assert await answer == "a has left: its training process died"
    with pytest.raises(PeerError, match="a has left the run: should it come back, it can be drained then"):
        await post_drain(url(stage), "a")


async def test_a_drain_that_its_learner_has_not_heard_of_is_answered_as_asked_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, _ = await one_at_work(stage)
    monkeypatch.setattr(operator, "ANSWER_S", 0.0)
    said = await post_drain(url(stage), "a")
    assert said.startswith("a is asked to leave, but has not answered yet: it hears of it after its step.")
    await learner.link.close()
    await stage.until("lost")
    assert "it is away, and hears of it when it is back" in await post_drain(url(stage), "a")
    another = stage.join("a", process=2)
    await another.until(Welcome)
    assert not any(isinstance(message, Drain) for message in another.heard), "it was meant for the process before"


async def test_only_one_that_is_there_can_be_drained(stage: Stage) -> None:
    await stage.open()
    with pytest.raises(PeerError, match="no learner of this run is called 'a': atoll status says who is there"):
        await post_drain(url(stage), "a")
    learner, other = stage.join("a"), stage.join("b")
    await learner.until(Welcome)
    await other.until(Welcome)
    await learner.link.close()
    await stage.until("lost")
    with pytest.raises(PeerError, match="a is away: it can be drained once it is back"):
        await post_drain(url(stage), "a")
    assert not any(isinstance(message, Drain) for message in other.heard)


async def test_nobody_is_drained_out_of_a_run_that_ends(stage: Stage) -> None:
    learner, _ = await one_at_work(stage)
    stage.service.end("the test is over")
    await learner.until(Ending)
    said = "the run is ending, and a leaves with it: its last steps are collected"
    assert await post_drain(url(stage), "a") == said
    assert not any(isinstance(message, Drain) for message in learner.heard)


async def test_the_welcome_says_what_both_sides_speak(stage: Stage) -> None:
    await stage.open(weight_limit=4.0)
    welcome = await stage.join("a").until(Welcome)
    assert (welcome.protocol, welcome.settings.weight_limit) == (2, 4.0)


async def test_a_slow_reader_costs_nobody_else_a_connection(stage: Stage) -> None:
    """One fetches a fragment whole and then uploads on the same connection, while another never reads what it asked
    for: versions later that one is cut off, alone."""
    size = 4 << 20
    await stage.open()
    honest = stage.join("honest", (TensorSpec("one", (size,), "float32"), TensorSpec("two", (size,), "float32")))
    await honest.begin()
    parameters, port = stage.service.begun.parameters, stage.service.server.port
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", port))
    shown = parse_address(url(stage), {}).headers_for(f"{url(stage)}/v1/fragments/0")
    asked = "GET /v1/fragments/0 HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: {Authorization}\r\n\r\n"
    slow.sendall(asked.format(**shown).encode())
    await until(lambda: parameters.committed_buffers()[0].readers == 1)
    begun, over = asyncio.Event(), asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield bytes(4096)
        begun.set()
        await over.wait()
        yield bytes(4096)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1), headers=shown) as http:
        async with http.get(f"{url(stage)}/v1/fragments/0") as answer:
            assert len(await answer.read()) == 4 * size
        headers = {"Content-Length": "8192"}
        upload = asyncio.ensure_future(http.put(f"{url(stage)}/v1/probe/8192", data=body(), headers=headers))
        await begun.wait()
        held = []
        for version in range(1, OLD + 2):
            parameters.stage_merge(0, [np.full(size, 1e-3, np.float32)], [1.0])
            parameters.commit_version(0, version, version)
            held.append(parameters.serve_fragment(0))
        over.set()
        async with asyncio.timeout(WAIT_S):
            assert (await upload).status == 204
    assert await asyncio.to_thread(rest_of, slow) < 4 * size
    for one in held:
        one.release()


def rest_of(sock: socket.socket) -> int:
    """How many bytes come until its peer hangs up."""
    found = 0
    with sock, suppress(ConnectionError):
        while data := sock.recv(1 << 20):
            found += len(data)
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - nobody tells when it becomes true
            await asyncio.sleep(0.005)
