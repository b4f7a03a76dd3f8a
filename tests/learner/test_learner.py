"""The public face: alone, and against a courier that the test plays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import atoll
from atoll.learner import joining, saved_state, script
from atoll.learner.data import NO_STEP, LeasedSamples
from atoll.learner.learner import Learner
from atoll.learner.saved_state import read_lives, read_run
from atoll.learner.script import FILE
from atoll.learner.session import RunSession
from atoll.learner.unmerged import LOOK_EVERY
from atoll.mailbox.box import Mailbox
from atoll.mailbox.channel import (
    AdoptOrder,
    CopyMade,
    DialFailed,
    ForgetOrder,
    Goodbye,
    GoOrder,
    HoldOrder,
    MailboxReady,
    ReadOrder,
    RunProgress,
    SettingsTold,
    Start,
    StepMissing,
    StepReport,
    StopOrder,
    ToCourier,
    ToTraining,
    VersionTaken,
    Welcomed,
)
from atoll.numerics.fragments import make_plan
from atoll.protocol.errors import ConfigError, RunFailed
from atoll.protocol.learner import effects as fx
from atoll.protocol.messages import Range
from atoll.protocol.settings import Settings


@pytest.fixture(autouse=True)
def _no_run_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOLL_SYNCER", "ATOLL_JOIN", "ATOLL_LEARNER", "ATOLL_ROLE", "ATOLL_SEED"):
        monkeypatch.delenv(name, raising=False)


def small() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(2, 1)


def half_frozen() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2).requires_grad_(False), small())


class TestAlone:
    @pytest.mark.parametrize("loader", [{}, {"collate_fn": list}])
    def test_after_the_last_step_of_the_pass_all_of_it_is_done(self, loader: dict[str, type]) -> None:
        with Learner(small()) as learner:
            seen = []
            for _ in learner.batches(torch.zeros(20, 2), batch_size=4, **loader):
                seen.append(learner.progress)
                learner.step(tokens=4)
            assert [*seen, learner.progress] == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])

    def test_it_counts_and_changes_nothing(self) -> None:
        model = small()
        before = model.weight.detach().clone()
        with Learner(model) as learner:
            assert learner.alone
            learner.step(tokens=5, loss=torch.tensor(1.0))
            learner.step(tokens=5)
            assert (learner.steps, learner.global_step, learner.progress, learner.done) == (2, 2, 0.0, False)
            assert learner.index == 0
        assert torch.equal(model.weight, before)

    def test_it_says_that_it_is_alone(self, capsys: pytest.CaptureFixture[str]) -> None:
        with Learner(small()):
            pass
        said = capsys.readouterr().err
        assert said.startswith("atoll: alone: no run is named") and said.count("\n") == 1

    def test_batches_are_one_pass(self) -> None:
        data = torch.arange(10).view(5, 2)
        with Learner(small()) as learner:
            batches = list(learner.batches(data, batch_size=2))
        assert len(batches) == 2
        assert all(batch.shape == (2, 2) for batch in batches)

    def test_any_model_will_do(self) -> None:
        with Learner(nn.BatchNorm1d(3)) as learner:
            learner.step(tokens=1)

    def test_a_step_outside_of_with_is_an_error(self) -> None:
        learner = Learner(small())
        with pytest.raises(RuntimeError, match="outside of 'with"):
            learner.step(tokens=1)
        with learner:
            learner.step(tokens=1)
        with pytest.raises(RuntimeError, match="outside of 'with"):
            learner.step(tokens=1)

    def test_tokens_are_a_whole_number_of_at_least_zero(self) -> None:
        with Learner(small()) as learner:
            with pytest.raises(ValueError, match="tokens = -1 is below zero"):
                learner.step(tokens=-1)
            with pytest.raises(TypeError, match=r"tokens is a whole number.*here it is a float"):
                learner.step(tokens=1.5)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match=r"here it is a Tensor. As in learner.step\(len\(batch\), loss\)"):
                learner.step(torch.tensor(0.5))  # type: ignore[arg-type]
            learner.step(tokens=torch.tensor(3))  # type: ignore[arg-type]
            assert learner.steps == 1 and learner._tally.tokens == 3

    def test_the_scripts_errors_pass_unchanged(self) -> None:
        with pytest.raises(KeyboardInterrupt), Learner(small()):
            raise KeyboardInterrupt
        with pytest.raises(ZeroDivisionError), Learner(small()):
            raise ZeroDivisionError

    def test_an_evaluator_without_a_scorer_ends_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ATOLL_ROLE", "evaluator")
        with pytest.raises(SystemExit, match="brings no scorer"):
            Learner(small())


Courier = Callable[[ToCourier], list[ToTraining]]


class Scripted:
    """A courier in this process: answers frames by a function, and remembers them."""

    def __init__(self, answers: Courier) -> None:
        self.answers, self.sent = answers, []
        self.waiting: list[ToTraining] = []
        self.started = self.dead = self.closed = self.clogged = self.replays = False

    def start(self) -> None:
        self.started = True

    def send(self, frame: ToCourier, descriptor: int | None = None) -> None:
        self.sent.append(frame)
        self.waiting += self.answers(frame)

    def receive(self) -> list[ToTraining]:
        frames, self.waiting = self.waiting, []
        return frames

    def restart_if_dead(self) -> bool:
        dead, self.dead = self.dead, False
        return dead

    def wait(self, seconds: float) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def of(self, kind: type[object]) -> list[ToCourier]:
        return [frame for frame in self.sent if isinstance(frame, kind)]


class Joined:
    """A learner whose model becomes version 0 of the run; the test then sends what it likes."""

    def __init__(self, model: nn.Module, rules: Settings | None = None, **options: object) -> None:
        self.rules = rules or Settings(fragments=2, overlap=0).resolved(2)
        self.courier = Scripted(self._answer)
        self.learner = Learner(model, syncer="http://127.0.0.1:9", name="learner-0", **options)  # type: ignore[arg-type]
        self.learner._courier = self.courier  # type: ignore[assignment]
        self.leaving: list[ToTraining] = [StopOrder("the run is over", final=True)]

    def name_run(self, run: str) -> None:
        """As the courier does in the shared memory."""
        answers = self.courier.answers

        def answer(frame: ToCourier) -> list[ToTraining]:
            if isinstance(frame, MailboxReady):
                self.box.run = run
            return answers(frame)

        self.courier.answers = answer

    def _answer(self, frame: ToCourier) -> list[ToTraining]:
        if isinstance(frame, Start) and not frame.boxed:
            plan = make_plan(frame.tensors, self.rules.fragments)
            return [Welcomed(self.rules, plan.fingerprint, 1), RunProgress()]
        if isinstance(frame, MailboxReady) and len(self.courier.of(MailboxReady)) == 1:
            return [fx.Own()]
        if isinstance(frame, StepReport) and frame.stepped.stopped:
            return self.leaving
        return []

    @property
    def box(self) -> Mailbox:
        assert self.stay.shared.box is not None
        return self.stay.shared.box

    @property
    def stay(self) -> RunSession:
        assert self.learner._session is not None
        return self.learner._session


@pytest.fixture
def joined() -> Joined:
    return Joined(small(), join_wait_s=5.0)


class TestInARun:
    def test_entering_shares_the_model_and_waits_for_parameters(self, joined: Joined) -> None:
        with joined.learner as learner:
            assert not learner.alone and not learner.done
            assert joined.box.adopted.tolist() == [0, 0]
            assert sum(joined.box.base(f).size for f in range(2)) == 3

    def test_garbage_is_collected_while_it_joins_and_not_in_the_middle_of_training(self, joined: Joined) -> None:
        model = small()
        model.itself = model  # only a full collection finds it
        left, old = weakref.ref(model), gc.get_threshold()
        gc.collect()  # it is old by now, as what a compiler left would be
        gc.set_threshold(0)
        try:
            del model
            assert left() is not None
            with joined.learner:
                assert left() is None
        finally:
            gc.set_threshold(*old)

    def test_one_that_is_answered_at_once_does_not_say_that_nobody_answers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It was said before the first look at what the courier had heard."""
        monkeypatch.setattr(joining, "SILENT_S", 0.0)
        monkeypatch.setenv("ATOLL_FOLDER", str(tmp_path))  # so its run is not asked for
        with Joined(small(), join_wait_s=5.0).learner:
            assert "dialling" not in capsys.readouterr().err

    def test_it_says_once_which_run_it_joined_and_as_whom(
        self, joined: Joined, capsys: pytest.CaptureFixture[str]
    ) -> None:
        joined.name_run("r1")
        with joined.learner as learner:
            assert capsys.readouterr().err == "atoll: joined run r1 as learner-0\n"
            learner.step(tokens=1)
            assert capsys.readouterr().err == ""
        assert read_run(Path("atoll-learners/r1/learner-0")) == "r1"

    @pytest.mark.parametrize(
        ("wait_s", "words"),
        [
            (30.0, "it begins once 4 learners are here, or after 30 s"),
            (0.0, "it begins with the first parameters"),
        ],
    )
    def test_it_says_at_once_that_it_waits_for_a_run_to_begin(
        self, capsys: pytest.CaptureFixture[str], wait_s: float, words: str
    ) -> None:
        rules = Settings(learners=4, fragments=2, overlap=0, wait_for_learners_s=wait_s).resolved(2)
        joined = Joined(small(), rules, join_wait_s=5.0)
        joined.name_run("r1")
        answers, said = joined.courier.answers, []

        def answer(frame: ToCourier) -> list[ToTraining]:
            if isinstance(frame, MailboxReady):
                said.append(capsys.readouterr().err)
            return [
                msgspec.structs.replace(one, run="r1", versions=(-1, -1)) if isinstance(one, Welcomed) else one
                for one in answers(frame)
            ]

        joined.courier.answers = answer
        with joined.learner:
            assert said[0] == f"atoll: connected to run r1 as learner-0; {words}\n"
            assert capsys.readouterr().err == "atoll: joined run r1 as learner-0\n"

    def test_one_that_begins_without_the_runs_parameters_says_when_it_has_joined(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        joined = Joined(small(), join_wait_s=0.0)
        answers, joined.courier.answers = joined.courier.answers, lambda frame: []
        with joined.learner as learner:
            learner.step(tokens=1)
            assert "joined run" not in (said := capsys.readouterr().err) and "joins when it can" in said
            joined.courier.answers = answers
            joined.courier.waiting += answers(joined.courier.of(Start)[0])
            learner.step(tokens=1)
            learner.step(tokens=1)
            assert capsys.readouterr().err.startswith("atoll: joined run ")

    def test_a_dead_address_ends_it_with_true_words(self, capsys: pytest.CaptureFixture[str]) -> None:
        joined = Joined(small(), join_wait_s=0.05)
        joined.courier.answers = lambda frame: [DialFailed("connection refused")] if isinstance(frame, Start) else []
        with pytest.raises(SystemExit) as caught, joined.learner:
            pytest.fail("it must not train alone")
        assert caught.value.code == 1
        said = capsys.readouterr().err
        assert said.startswith(
            "atoll: no syncer answers at 127.0.0.1:9: connection refused, tried for 0.05 s; is the run over"
        )
        assert "atoll tokens link --run DIR prints a fresh link" in said
        assert said.count("\n") == 1

    def test_a_part_of_a_cut_of_its_own_is_put_back_by_hand(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("atoll.learner.joining.ask_run", lambda syncer: "r1")
        self.train_twice(capsys)
        assert Path("atoll-learners/r1/learner-0/cut-000007.safetensors").exists()

    def train_twice(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The learner is killed, and started again with the same line."""
        for life in (1, 2):
            model = small()
            optimizer = torch.optim.AdamW(model.parameters())
            joined = Joined(model, optimizer=optimizer)
            joined.name_run("r1")
            with joined.learner as learner:
                start = joined.courier.of(Start)[0]
                assert isinstance(start, Start) and start.restored == (life == 2)
                assert len(optimizer.state) == (2 if life == 2 else 0), "AdamW's moments of weight and bias"
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                joined.courier.waiting.append(fx.Save(cut=7))
                learner.step(tokens=1)
                joined.stay._saver.finish(20.0)
                learner.step(tokens=1)
                [kept] = joined.courier.of(fx.Saved)
                assert isinstance(kept, fx.Saved) and kept.file == "cut-000007.safetensors", kept
        assert "goes on with the inner optimizer, schedules and random states of step 1" in capsys.readouterr().err

    def test_a_part_of_another_run_is_not(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ATOLL_FOLDER", "own")
        self.train_twice(capsys)
        model = small()
        optimizer = torch.optim.AdamW(model.parameters())
        joined = Joined(model, optimizer=optimizer)
        joined.name_run("r2")
        with joined.learner:
            assert not optimizer.state
        said = capsys.readouterr().err
        assert "is of run r1: the inner optimizer begins afresh" in said and "joined run r2" in said
        assert read_run(Path("own")) == "r2" and Path("own/r1/cut-000007.safetensors").exists(), "never deleted"

    def test_a_part_is_found_at_another_address_and_another_run_on_the_same_one_leaves_it(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runs = iter(["r1", "r1", "r2", "r1"])
        monkeypatch.setattr("atoll.learner.joining.ask_run", lambda syncer: next(runs))
        self.train_twice(capsys)
        for run, kept in (("r2", False), ("r1", True)):
            joined = Joined(model := small(), optimizer=torch.optim.AdamW(model.parameters()))
            joined.name_run(run)
            with joined.learner:
                start = joined.courier.of(Start)[0]
                assert isinstance(start, Start) and start.restored == kept

    def test_a_syncer_that_is_not_there_yet_is_asked_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What it saved of the run is looked for once the run is known: it may be started before its syncer."""
        answers = iter([None, None, "r1"])
        monkeypatch.setattr("atoll.learner.joining.ask_run", lambda syncer: next(answers))
        joined = Joined(small(), join_wait_s=5.0)
        with joined.learner:
            assert next(answers, "no more") == "no more"
            assert joined.stay._folder == Path("atoll-learners/r1/learner-0").absolute()

    def test_every_step_is_reported_with_its_counters(self, joined: Joined) -> None:
        with joined.learner as learner:
            learner.step(tokens=3, loss=0.5)
            learner.step(tokens=4)
        steps = [frame.stepped for frame in joined.courier.of(StepReport)]  # type: ignore[attr-defined]
        assert [(s.t, s.steps, s.tokens, s.tokens_total, s.loss) for s in steps[:2]] == [
            (1, (1, 1), (3, 3), 3, 0.5),
            (2, (2, 2), (7, 7), 7, 0.5),
        ]
        assert steps[-1].stopped
        assert steps[0].busy_s <= steps[1].busy_s

    def test_reports_are_left_out_while_the_courier_does_not_keep_up(self, joined: Joined) -> None:
        with joined.learner as learner:
            joined.courier.clogged = True
            learner.step(tokens=3)
            assert joined.courier.of(StepReport) == []
            joined.courier.clogged = False
            learner.step(tokens=3)
            [step] = joined.courier.of(StepReport)
            assert step.stepped.tokens_total == 6  # type: ignore[attr-defined]

    def test_the_run_tells_how_far_it_is(self, joined: Joined) -> None:
        with joined.learner as learner:
            joined.courier.waiting.append(RunProgress(committed=70, progress=0.5, global_step=77))
            joined.stay.wait(0.0)  # as `batches` does while it waits for a lease
            assert (learner.progress, learner.global_step) == (0.0, 0), "what a step knows does not change under it"
            learner.step(tokens=3)
            assert (learner.progress, learner.global_step) == (0.5, 77)
        assert (learner.progress, learner.global_step) == (0.5, 77)

    def test_it_has_a_number_in_the_run_once_it_has_heard_of_it(self, joined: Joined) -> None:
        with pytest.raises(RuntimeError, match="known inside of 'with"):
            _ = joined.learner.index
        with joined.learner as learner:
            with pytest.raises(RuntimeError, match=r"not known: the run was not heard of; use learner.seed"):
                _ = learner.index
            joined.courier.waiting.append(Welcomed(joined.rules, joined.box.plan.fingerprint, 1, (0, 0), 3))
            learner.step(tokens=1)
            assert learner.index == 3

    def test_its_seed_stays_that_of_the_life_it_began_with(self, joined: Joined) -> None:
        with pytest.raises(RuntimeError, match="known inside of 'with"):
            _ = joined.learner.seed
        with joined.learner as learner:
            began = learner.seed
            joined.courier.waiting.append(Welcomed(joined.rules, joined.box.plan.fingerprint, 2, (0, 0), 3))
            learner.step(tokens=1)
            assert learner.seed == began

    def test_batches_go_on_until_the_run_is_done(self, joined: Joined) -> None:
        seen = 0
        with joined.learner as learner:
            for _ in learner.batches(torch.zeros(4, 2), batch_size=2):
                seen += 1
                if seen == 7:
                    joined.courier.waiting.append(StopOrder("1,000 steps are done", final=False))
                learner.step(tokens=2)
        assert seen == 7 and learner.done

    @pytest.mark.parametrize("stepped", [False, True])
    def test_batches_without_a_step_are_asked_about(
        self, joined: Joined, capsys: pytest.CaptureFixture[str], stepped: bool
    ) -> None:
        """After a step it may be accumulation."""
        answers, supply = joined.courier.answers, fx.Supply((Range(0, 0, 0, 0, 8),), False, "")
        joined.courier.answers = lambda frame: [supply] if isinstance(frame, fx.Registered) else answers(frame)
        with joined.learner as learner:
            for seen, _ in enumerate(learner.batches(torch.zeros(8, 2), batch_size=2), 1):
                if stepped and seen == 1:
                    learner.step(tokens=2)
                if seen == 2 * NO_STEP:
                    break
            asked = capsys.readouterr().err.count(f"{NO_STEP} batches were handed out and no step was made: does the")
            assert asked == len(joined.courier.of(StepMissing)) == (0 if stepped else 1)

    def test_a_loop_that_goes_on_after_the_end_gives_its_last_steps_and_its_later_steps_count_for_nothing(
        self, joined: Joined, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with joined.learner as learner:
            learner.step(tokens=2)
            joined.courier.waiting.append(StopOrder("2 steps are done", final=False))
            learner.step(tokens=2)
            assert learner.done and not joined.courier.of(StepReport)[-1].stepped.stopped, "its loop may end by itself"
            assert "trains on" not in capsys.readouterr().err
            learner.step(tokens=2)
            last = joined.courier.of(StepReport)[-1].stepped
            assert (last.stopped, last.t, last.tokens_total) == (True, 3, 6), "its model holds this step too"
            for _ in range(5):
                learner.step(tokens=2)
            assert joined.courier.of(StepReport)[-1].stepped is last and joined.box.tokens.tolist() == [6, 6]
            assert learner.steps == 8, "a loop may count by it"
        assert learner.finished
        said = capsys.readouterr().err
        assert said.count("the script trains on after the run's end: break its loop at learner.done") == 1
        assert "5 steps were made after the run's end: they are in no model and no figure" in said

    def test_batches_that_a_loader_drew_before_the_end_are_trained_on(
        self, joined: Joined, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with joined.learner as learner:
            joined.stay._feed._leased = leased = LeasedSamples([8], 2, 0)
            leased.add_leases([Range(0, 0, 0, 0, 8)], over=False)
            joined.stay._feed.count_by(lambda: 1)
            drawn = [leased.draw_batch() for _ in range(4)]
            joined.courier.waiting.append(StopOrder("1 step is done", final=False))
            for _ in drawn:
                learner.step(tokens=2)
            assert [frame.stepped.tokens_total for frame in joined.courier.of(StepReport)][-1] == 8
        assert "after the run's end: they" not in capsys.readouterr().err

    def test_a_new_version_is_in_the_model_after_the_step(self, joined: Joined) -> None:
        with joined.learner as learner:
            joined.box.incoming(0, 0)[:] = 9.0
            joined.courier.waiting.append(AdoptOrder(0, 0, 1, 0, "overwrite", 0.5, 0))
            learner.step(tokens=1)
            [piece] = joined.box.plan.fragments[0].pieces
            assert (learner.model.get_parameter(piece.label) == 9.0).all()
            assert len(joined.courier.of(VersionTaken)) == 1

    def test_a_hold_is_waited_out(self, joined: Joined) -> None:
        with joined.learner as learner:
            order = AdoptOrder(0, 1, 1, 1, "overwrite", 0.5, 1)
            joined.courier.waiting.append(HoldOrder(round=1, fragment=1, step=1))
            joined.courier.answers = lambda frame: [order] if isinstance(frame, StepReport) else []
            learner.step(tokens=1)
            assert joined.box.adopted.tolist() == [0, 1]
            joined.courier.answers = joined._answer

    def test_a_copy_that_is_ordered_while_it_waits_for_its_round_is_made(self, joined: Joined) -> None:
        """Seed 672 with ranks: the order for the step came after that step, and the round waited for the copy, which
        waited for the next step, which waited for the round."""
        with joined.learner as learner:
            late, order = ReadOrder(0, 1, 1, step=1), AdoptOrder(0, 1, 1, 1, "overwrite", 0.5, 1)
            answers = {StepReport: [HoldOrder(round=1, fragment=1, step=1), late], CopyMade: [order]}
            joined.courier.waiting.append(HoldOrder(round=1, fragment=1, step=1))
            joined.courier.answers = lambda frame: answers.get(type(frame), [])
            learner.step(tokens=1)
            assert joined.box.adopted.tolist() == [0, 1]
            joined.courier.answers = joined._answer

    def test_a_replay_that_says_the_end_is_waited_for_before_the_next_step(self, joined: Joined) -> None:
        """A loader's prefetched batches come after the end is told, and what was adopted there is adopted here."""
        joined.courier.replays = True
        joined.courier.waiting.append(GoOrder(1))
        later: list[list[ToTraining]] = [
            [StopOrder("as in the run", final=False)],
            [AdoptOrder(0, 0, 1, -1, "overwrite", 0.5, 0)],
            [GoOrder(2)],
        ]
        joined.courier.wait = lambda seconds: joined.courier.waiting.extend(later.pop(0))  # type: ignore[method-assign]
        with joined.learner as learner:
            learner.step(tokens=1)
            assert learner.done and not later
            assert joined.box.adopted.tolist() == [1, 0]
            later.append([StopOrder("the replay is over", final=True)])
            learner.step(tokens=1)

    def test_a_recovery_resets_the_inner_optimizer_only_when_asked(self) -> None:
        model = small()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        joined = Joined(model, optimizer=optimizer)
        with joined.learner as learner:
            joined.courier.waiting.append(ForgetOrder(epoch=1, reset=False))
            learner.step(tokens=1)
            assert optimizer.state
            joined.courier.waiting.append(ForgetOrder(epoch=2, reset=True))
            learner.step(tokens=1)
            assert not optimizer.state

    def test_a_new_courier_is_told_all_it_needs(self, joined: Joined, capsys: pytest.CaptureFixture[str]) -> None:
        with joined.learner as learner:
            learner.step(tokens=1)
            joined.courier.sent.clear()
            joined.courier.dead = True
            learner.step(tokens=1)
            start, box, *_ = joined.courier.sent
            assert isinstance(start, Start) and start.boxed
            assert isinstance(box, MailboxReady) and box.stepped.t == 2
            joined.courier.answers = lambda frame: joined.leaving if isinstance(frame, StepReport) else []
        assert "the courier died" in capsys.readouterr().err

    def test_after_the_end_no_new_courier_is_started(self, joined: Joined) -> None:
        with joined.learner as learner:
            joined.courier.waiting.append(StopOrder("the run is over", final=True))
            learner.step(tokens=1)
            joined.courier.sent.clear()
            joined.courier.dead = True
            learner.step(tokens=1)
            assert joined.courier.of(Start) == []

    def test_other_settings_make_the_shared_memory_anew(self, joined: Joined) -> None:
        with joined.learner as learner:
            old = joined.box
            other = Settings(fragments=1, overlap=0).resolved(2)
            fingerprint = make_plan(joined.stay.shared.tensors, 1).fingerprint
            joined.courier.waiting += [Welcomed(other, fingerprint, 1), fx.Own()]
            learner.step(tokens=1)
            assert joined.box is not old and old.fd == -1
            assert joined.box.adopted.tolist() == [0]
            assert len(joined.courier.of(MailboxReady)) == 2
            joined.courier.waiting += [Welcomed(other, fingerprint, 1)]
            learner.step(tokens=1)
            assert len(joined.courier.of(MailboxReady)) == 2, "the same settings change nothing"


class TestLeaving:
    def test_it_knows_of_a_budget_and_that_it_holds_the_final_parameters(self) -> None:
        joined = Joined(small(), Settings(steps=1, fragments=2, overlap=0).resolved(2), join_wait_s=5.0)
        with joined.learner as learner:
            assert learner.has_budget and not learner.finished
        assert learner.finished

    def test_a_script_that_ends_early_says_so_once_nothing_is_left_to_merge(self, joined: Joined) -> None:
        joined.leaving = []
        with joined.learner as learner:
            assert not learner.has_budget
        assert not learner.finished
        assert joined.courier.of(Goodbye) == [Goodbye("it left before the run ended")]
        assert joined.courier.closed

    def test_last_steps_that_nobody_merges_are_waited_for_only_so_long(
        self, joined: Joined, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(script, "LEAVE_WAIT_S", 0.05)
        joined.leaving = []
        with joined.learner as learner:
            learner.step(tokens=1)
        assert joined.courier.of(Goodbye) == [Goodbye("it left before the run ended")]

    def test_nobody_hurries_a_drain_but_a_signal_does(
        self, joined: Joined, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Two cycles of its own steps, so that every fragment has had its round; clouds do not give so much."""
        joined.leaving = []
        with joined.learner as learner:
            joined.courier.waiting.append(fx.AskToLeave("the operator asked"))
            learner.step(tokens=1)
            assert learner.done and not joined.stay._preemption.hurried
            joined.stay._tally.busy_s = 30.0
            assert joined.stay._patience_s() == 2 * joined.rules.sync_every * 30.0
            waits = 0

            def wait(seconds: float) -> None:
                nonlocal waits
                waits += 1
                if waits == 3:
                    joined.stay._preemption._terminated(15, None)
                    monkeypatch.setattr(script, "DRAIN_S", -1.0)

            monkeypatch.setattr(joined.courier, "wait", wait)
        assert waits == 3 and joined.courier.of(StepReport)[-1].stepped.leaving  # type: ignore[attr-defined]
        [bye] = joined.courier.of(Goodbye)
        assert bye.reason.startswith("it was drained: the operator asked")  # type: ignore[attr-defined]

    def test_a_drain_in_a_later_phase_has_the_time_of_its_cycles(self, joined: Joined) -> None:
        """It was welcomed in a phase of a small H; later an operator asks for a larger one."""
        warm = Settings(steps=1000, warm_start=0.1).resolved(1000)
        with joined.learner as learner:
            learner.step(tokens=1)
            joined.stay._tally.busy_s = 30.0
            assert joined.stay.shared.boundary is not None
            joined.stay.shared.boundary.settings = warm.in_phase(1, warm)
            assert joined.stay._patience_s() == 2 * 24 * 30.0
            joined.courier.waiting.append(SettingsTold(msgspec.structs.replace(warm, sync_every=50)))
            joined.stay._listen()
            assert joined.stay._patience_s() == 2 * 50 * 30.0

    @pytest.mark.parametrize(
        ("asked", "code", "why"),
        [
            ("signal", 143, "its machine is taken away (SIGTERM)"),
            ("signal whose exception is lost", 143, "its machine is taken away (SIGTERM)"),
            ("drain", 0, "it was drained: the operator asked"),
        ],
    )
    def test_one_that_is_asked_to_leave_before_it_has_joined_ends_its_script(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: str, code: int, why: str
    ) -> None:
        joined = Joined(small(), join_wait_s=600.0)
        joined.courier.answers = lambda frame: []

        def ask(seconds: float) -> None:
            if asked == "drain":
                joined.courier.waiting.append(fx.AskToLeave("the operator asked"))
                return
            with suppress(script.LeftUnjoined) if "lost" in asked else nullcontext():  # as a destructor would
                joined.stay._preemption._terminated(15, None)

        monkeypatch.setattr(joined.courier, "wait", ask)
        with pytest.raises(SystemExit) as ended, joined.learner:
            pytest.fail("it must not train")
        assert ended.value.code == code
        assert joined.courier.of(Goodbye) == [Goodbye(f"{why}; it had not joined yet")]
        said = capsys.readouterr().err
        assert said.startswith("atoll: ended before it joined the run, which has nothing of it: ") and why in said
        assert said.count("\n") == 1

    def test_a_preemption_while_joining_leaves_the_state_that_the_one_before_saved(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It was removed as soon as it was read, and the inner optimizer began afresh."""
        monkeypatch.setenv("ATOLL_FOLDER", str(tmp_path))

        def start() -> Joined:
            model = small()
            joined = Joined(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), join_wait_s=5.0)
            joined.name_run("r1")
            joined.leaving = []
            return joined

        first = start()
        with first.learner as learner:
            learner.step(tokens=1)
            first.stay._preemption._terminated(15, None)
        assert (tmp_path / FILE).exists() and read_lives(tmp_path) == []

        second = start()
        second.courier.answers = lambda frame: []
        monkeypatch.setattr(second.courier, "wait", lambda seconds: second.stay._preemption._terminated(15, None))
        with pytest.raises(script.LeftUnjoined), second.learner:
            pytest.fail("it must not train")
        assert (tmp_path / FILE).exists()

        capsys.readouterr()
        third = start()
        with third.learner:
            assert "goes on with the inner optimizer, schedules and random states of step 1" in capsys.readouterr().err
            assert not (tmp_path / FILE).exists(), "its next cut is newer"
            third.stay._final = True
        assert read_lives(tmp_path) == [], "no cut is kept for it"

    def test_a_state_that_cannot_be_put_back_costs_one_start(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ATOLL_FOLDER", str(tmp_path))
        first = Joined(small(), join_wait_s=5.0)
        first.leaving = []
        with first.learner as learner:
            learner.step(tokens=1)
            first.stay._preemption._terminated(15, None)
        second = Joined(small(), join_wait_s=5.0)
        monkeypatch.setattr(saved_state.OwnState, "restore_saved", lambda *words: 1 / 0)
        with pytest.raises(ZeroDivisionError), second.learner:
            pytest.fail("it must not train")
        assert not (tmp_path / FILE).exists()

    def test_an_end_that_never_comes_is_waited_for_only_so_long(
        self, joined: Joined, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(script, "END_WAIT_S", 0.05)
        joined.leaving = []
        with joined.learner as learner:
            joined.courier.waiting.append(StopOrder("100 steps are done", final=False))
            learner.step(tokens=1)
        assert joined.courier.of(Goodbye) == [Goodbye("the end of the run did not come")]

    def test_a_script_that_fails_says_goodbye_and_fails_as_it_would_alone(self, joined: Joined) -> None:
        with pytest.raises(ZeroDivisionError) as caught, joined.learner:
            raise ZeroDivisionError("no samples")
        where = f"(test_learner.py, line {caught.traceback[0].lineno + 1})"
        reason = f"its training script ended with ZeroDivisionError: no samples {where}"
        assert joined.courier.of(Goodbye) == [Goodbye(reason)]
        assert joined.courier.closed

    def test_ctrl_c_is_one_line_and_130(self, joined: Joined, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught, joined.learner:
            raise KeyboardInterrupt
        assert caught.value.code == 130
        assert joined.courier.of(Goodbye) == [Goodbye("it was interrupted")]
        assert capsys.readouterr().err.splitlines()[1:] == ["atoll: interrupted; the same command lets it join again"]

    def test_a_learner_is_entered_once(self, joined: Joined) -> None:
        with joined.learner:
            pass
        with pytest.raises(RuntimeError, match="entered once"), joined.learner:
            pass


class TestNewcomer:
    def seeking(self, joined: Joined) -> None:
        """The run has parameters at once; a peer's state is sought."""

        def answer(frame: ToCourier) -> list[ToTraining]:
            sought: list[ToTraining] = [fx.Await()] if isinstance(frame, MailboxReady) else []
            return sought + joined._answer(frame)

        joined.courier.answers = answer

    def test_it_does_not_begin_before_it_is_known_what_becomes_of_a_peers_state(
        self, joined: Joined, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.seeking(joined)
        waited: list[bool] = []

        def wait(seconds: float) -> None:
            waited.append(joined.stay._peers.waits)
            if len(waited) == 4:
                joined.courier.waiting.append(fx.Begin("goes on with the inner optimizer of learner-1"))

        monkeypatch.setattr(joined.courier, "wait", wait)
        with joined.learner:
            assert waited[2:4] == [True, True] and not joined.stay._peers.waits
            assert "goes on with the inner optimizer of learner-1" in capsys.readouterr().err

    def test_past_its_patience_it_trains_without(self, capsys: pytest.CaptureFixture[str]) -> None:
        joined = Joined(small(), join_wait_s=0.5)
        self.seeking(joined)
        with joined.learner as learner:
            assert "no state of a peer's for 0.5 s: training begins without it" in capsys.readouterr().err
            learner.step(tokens=1)

    def test_a_new_courier_hears_that_it_waits(self) -> None:
        joined = Joined(small(), join_wait_s=0.5)
        self.seeking(joined)
        with joined.learner as learner:
            joined.courier.sent.clear()
            joined.courier.dead = True
            learner.step(tokens=1)
            [box] = joined.courier.of(MailboxReady)
            assert box.waits  # type: ignore[attr-defined]
            joined.courier.answers = lambda frame: joined.leaving if isinstance(frame, StepReport) else []


class TestFailing:
    def stopped(self, joined: Joined, mistake: bool) -> StopOrder:
        return StopOrder("fragment plan differs from the run's", final=True, failed=True, mistake=mistake)

    @pytest.mark.parametrize(("mistake", "code"), [(True, 2), (False, 1)])
    def test_a_refusal_at_the_door_is_one_line_and_an_exit_code(
        self, joined: Joined, mistake: bool, code: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        joined.courier.answers = lambda frame: [self.stopped(joined, mistake)] if isinstance(frame, Start) else []
        with pytest.raises(SystemExit) as caught, joined.learner:
            raise AssertionError("never inside")
        assert caught.value.code == code
        assert capsys.readouterr().err == "atoll: fragment plan differs from the run's\n"
        assert joined.courier.closed and joined.courier.of(Goodbye) == []

    def test_a_refusal_on_the_way_can_be_caught_in_the_loop_and_ends_the_script_if_not(
        self, joined: Joined, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def script() -> None:
            with joined.learner as learner:
                joined.courier.waiting.append(self.stopped(joined, mistake=False))
                with pytest.raises(RunFailed):
                    learner.step(tokens=1)
                joined.courier.waiting.append(self.stopped(joined, mistake=True))
                learner.step(tokens=1)

        with pytest.raises(SystemExit) as caught:
            script()
        assert caught.value.code == 2
        assert isinstance(caught.value.__cause__, ConfigError)
        joined_line, *others = capsys.readouterr().err.splitlines()
        assert joined_line.startswith("atoll: joined run ") and len(others) == 1

    def test_a_model_that_cannot_take_part_never_starts_a_courier(self, capsys: pytest.CaptureFixture[str]) -> None:
        joined = Joined(small().double())
        with pytest.raises(SystemExit) as caught, joined.learner:
            raise AssertionError("never inside")
        assert caught.value.code == 2 and not joined.courier.started
        assert "'weight' is float64" in capsys.readouterr().err

    def test_other_frozen_parameters_than_the_runs_are_one_line_and_2(self, capsys: pytest.CaptureFixture[str]) -> None:
        joined = Joined(half_frozen(), frozen="refuse")
        answer = joined.courier.answers

        def of_another(frame: ToCourier) -> list[ToTraining]:
            return [msgspec.structs.replace(f, frozen="other") if isinstance(f, Welcomed) else f for f in answer(frame)]

        joined.courier.answers = of_another
        with pytest.raises(SystemExit) as caught, joined.learner:
            raise AssertionError("never inside")
        assert caught.value.code == 2
        assert "are not those of the run's first learner" in capsys.readouterr().err

    def test_a_layer_that_is_unfrozen_on_the_way_is_one_line_and_2(self, capsys: pytest.CaptureFixture[str]) -> None:
        model = half_frozen()

        def unfreeze(learner: Learner) -> None:
            learner.step(tokens=1)
            model[0].requires_grad_(True)
            for _ in range(LOOK_EVERY):
                learner.step(tokens=1)

        with pytest.raises(SystemExit) as caught, Joined(model).learner as learner:
            unfreeze(learner)
        assert caught.value.code == 2
        assert "parameter '0.weight' has begun to train" in capsys.readouterr().err

    def test_too_small_a_dataset_is_one_line_and_2(self, joined: Joined, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught, joined.learner as learner:
            next(learner.batches(torch.zeros(3, 2), batch_size=4))
        assert caught.value.code == 2
        assert "3 samples" in capsys.readouterr().err
        (goodbye,) = joined.courier.of(Goodbye)
        assert "ended with ConfigError: " in goodbye.reason and "3 samples" in goodbye.reason

    def test_another_version_of_atoll_is_named(self, joined: Joined, capsys: pytest.CaptureFixture[str]) -> None:
        joined.courier.answers = lambda frame: [Welcomed(joined.rules, "other", 1)] if isinstance(frame, Start) else []
        with pytest.raises(SystemExit) as caught, joined.learner:
            raise AssertionError("never inside")
        assert caught.value.code == 2
        assert "install the same version" in capsys.readouterr().err

    def test_without_a_syncer_training_begins_after_the_wait(self, capsys: pytest.CaptureFixture[str]) -> None:
        joined = Joined(small(), join_wait_s=0.01)
        joined.courier.answers = lambda frame: []
        with joined.learner as learner:
            assert "training begins without it" in capsys.readouterr().err
            learner.step(tokens=1)
            joined.courier.answers = joined._answer
            joined.courier.waiting.append(
                Welcomed(joined.rules, make_plan(joined.stay.shared.tensors, joined.rules.fragments).fingerprint, 1)
            )
            learner.step(tokens=1)
            learner.step(tokens=1)
            assert joined.box.adopted.tolist() == [0, 0]


def test_in_a_notebook_it_says_where_it_belongs_and_how_far_it_is() -> None:
    model = torch.nn.Linear(2, 1)
    learner = atoll.Learner(model, name="mine")
    assert repr(learner) == "<atoll.Learner mine, alone: not entered yet: with ... as learner, 0 steps, 0% of the run>"
    with learner:
        learner.step(tokens=1)
        assert "alone: training, 1 steps" in repr(learner)
    assert "has left" in repr(learner)
    link = f"atoll://{'f00d' * 16}@127.0.0.1:7077/r1/{'ab' * 32}"
    shown = repr(atoll.Learner(model, syncer=link, name="mine"))
    assert "127.0.0.1:7077" in shown and "f00d" not in shown


def test_names_and_help_are_those_of_a_user() -> None:
    assert dir(atoll) == ["KeptMoments", "Learner", "__version__", "attach", "evaluate", "kept_moments"]
    assert "learner.step(tokens=batch.numel(), loss=loss)" in (atoll.Learner.__doc__ or "")
