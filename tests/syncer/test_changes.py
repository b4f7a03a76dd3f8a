"""What an operator may change while a run goes on, and how a mistake is told."""

from __future__ import annotations

import msgspec
import pytest
from tests.syncer.conftest import TENSORS

from atoll.config import Outer
from atoll.protocol.errors import ConfigError
from atoll.protocol.history import History
from atoll.protocol.phases import TrainingPhase
from atoll.protocol.records import BegunRecord, ChangedRecord
from atoll.protocol.settings import Settings
from atoll.syncer.changes import RULES, parse_changes


def history(**settings: int) -> History:
    rules = Settings(**{"learners": 4, "fragments": 2, "sync_every": 8, **settings}).resolved(len(TENSORS))  # type: ignore[arg-type]
    return History(BegunRecord("run", rules, msgspec.to_builtins(Outer()), TENSORS, "plan"))


def test_a_policy_that_is_not_there_is_refused_before_the_run_takes_it() -> None:
    with pytest.raises(ConfigError, match="quorum_policy = 'nonsense' is not known: use one of grace, minimum"):
        parse_changes(history(), ["quorum_policy=nonsense"])


def test_words_become_settings_and_the_rest_stays() -> None:
    before = history()
    asked = parse_changes(before, ["quorum=2", "outer_lr=0.5", "quorum_policy=minimum"])
    assert asked is not None
    assert asked.settings == msgspec.structs.replace(before.settings, quorum=2, quorum_policy="minimum")
    assert asked.outer == {**before.outer, "lr": 0.5}
    assert asked.what == "quorum=2 outer_lr=0.5 quorum_policy=minimum" and not asked.reopen


@pytest.mark.parametrize("words", [["robust=true", "merge=rda"], ["guard=rollback"]], ids=str)
def test_what_needs_whole_tensors_is_refused_while_the_syncer_has_several_shards(words: list[str]) -> None:
    before = history()
    before.begun = msgspec.structs.replace(before.begun, shards=2)
    with pytest.raises(ConfigError, match="is for a syncer of one process, and shards = 2"):
        parse_changes(before, words)
    assert parse_changes(before, ["merge=mean", "robust=true"]) is not None


@pytest.mark.parametrize("key", RULES)
def test_every_rule_that_may_change_is_a_setting_of_its_kind(key: str) -> None:
    before = history()
    words = {"quorum": "3", "quorum_policy": "minimum", "grace_share": "0.25", "guard": "rollback", "adopt": "blend"}
    words |= {"progress": "added"}
    value = {**words, "phases": "[{until = 0.5}]"}.get(key, "7")
    before.settings = msgspec.structs.replace(before.settings, steps=100, progress="budget")  # a budget, for phases
    asked = parse_changes(before, [f"{key}={value}"])
    assert asked is not None
    now, was = msgspec.to_builtins(asked.settings), msgspec.to_builtins(before.settings)
    with_it = {"cut_every"} if key == "sync_every" else set()  # cuts come after as many learner steps
    assert {name for name in now if now[name] != was[name]} == {key, *with_it}
    assert type(now[key]) is type(was[key])


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("outer_lr=0.5", "lr", 0.5),
        ("outer_momentum=0.25", "momentum", 0.25),
        ("merge=mean", "merge", "mean"),
        ("norm_limit=4", "norm_limit", 4.0),
        ("robust=true", "robust", True),
    ],
)
def test_the_outer_step_changes_by_its_own_words(word: str, name: str, value: object) -> None:
    asked = parse_changes(history(), [word])
    assert asked is not None and asked.outer[name] == value
    assert asked.settings == history().settings


def test_one_learner_may_be_allowed_more() -> None:
    asked = parse_changes(history(), ["weight_limit.large=8", "weight_limit.larger=9.5"])
    assert asked is not None and asked.settings.weight_limits == {"large": 8.0, "larger": 9.5}
    run = history()
    run.apply(ChangedRecord(asked.settings, asked.outer, asked.what))
    again = parse_changes(run, ["weight_limit.large=1"])
    assert again is not None and again.settings.weight_limits == {"large": 1.0, "larger": 9.5}


def test_the_last_of_two_words_for_one_thing_counts() -> None:
    asked = parse_changes(history(), ["quorum=2", "quorum=3"])
    assert asked is not None and asked.settings.quorum == 3


def test_where_everything_is_like_that_already_nothing_is_asked() -> None:
    assert parse_changes(history(quorum=2), ["quorum=2", "outer_lr=0.6"]) is None
    assert parse_changes(history(), []) is None


def test_what_changed_before_is_what_changes_now() -> None:
    run = history()
    asked = parse_changes(run, ["quorum=2", "outer_lr=0.5"])
    assert asked is not None
    run.apply(ChangedRecord(asked.settings, asked.outer, asked.what))
    again = parse_changes(run, ["steps=50"])
    assert again is not None
    assert (again.settings.quorum, again.settings.steps, again.outer["lr"]) == (2, 50, 0.5)
    assert parse_changes(run, ["quorum=2"]) is None


def test_a_run_is_opened_again_also_without_a_word() -> None:
    asked = parse_changes(history(), [], reopen=True)
    assert asked is not None and asked.reopen
    assert (asked.settings, asked.what) == (history().settings, "the run goes on")
    asked = parse_changes(history(), ["steps=50"], reopen=True)
    assert asked is not None and asked.reopen and asked.what == "steps=50"


def test_the_default_rhythm_of_cuts_is_what_it_was_at_the_beginning() -> None:
    assert history().settings.cut_every == 20
    asked = parse_changes(history(cut_every=7), ["cut_every=-1"])
    assert asked is not None and asked.settings.cut_every == 20
    asked = parse_changes(history(), ["cut_every=0"])
    assert asked is not None and asked.settings.cut_every == 0


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("quorum", "'quorum' is not understood: write it as quorum=2"),
        ("quorum=", "'quorum=' is not understood: write it as quorum=2"),
        ("=2", "there is no setting '': did you mean weight_limit, "),
        ("qorum=2", "there is no setting 'qorum': did you mean quorum, quorum_policy or port?"),
        (
            "fragments=3",
            "'fragments' cannot change while a run goes on: start a new run for it, or change learners, quorum",
        ),
        ("outer_optimizer=sgd", "'outer_optimizer' cannot change while a run goes on"),
        ("seed=3", "'seed' cannot change while a run goes on"),
        ("quorum=two", "quorum=two: expected int, got str"),
        ("quorum=2.5", "quorum=2.5: "),
        ("merge=nonsense", "merge = 'nonsense' is not known: use one of mean"),
        ("quorum=5", "quorum = 5 can never be reached by 4 learners"),
        ("learners=0", "learners = 0 is too small"),
        ("steps=-1", "steps = -1 is too small"),
        ("lost_after_s=1", "lost_after_s = 1.0 is under two heartbeats"),
        ("norm_limit=0.5", "norm_limit = 0.5 must be above 1"),
        ("weight_limit.large=0.5", "weight_limit = 0.5 is not a number of 1"),
        (
            "weight_limit.=2",
            "there is no setting 'weight_limit.': did you mean weight_limit, norm_limit or outer_optimizer?",
        ),
        ("outer_lr=-1", "-1"),
        ("outer_lr=nan", "nan"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_word(word: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_changes(history(), [word])
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_mistake_changes_nothing_at_all() -> None:
    run = history()
    before = run.state()
    with pytest.raises(ConfigError):
        parse_changes(run, ["quorum=2", "fragments=3"])
    assert run.state() == before


# ---- H, τ, adoption and phases --------------------------------------------------------------------------------------

WARM = TrainingPhase(until=0.5, sync_every=2, overlap=1, adopt="carry", outer_lr=1.0)


def phased(*phases: TrainingPhase, **settings: object) -> History:
    usual = {"learners": 4, "fragments": 4, "sync_every": 8, "steps": 100, "adopt": "overwrite"}
    asked = {**usual, "phases": phases, **settings}
    rules = msgspec.convert(asked, Settings, from_attributes=True).resolved(len(TENSORS))
    return History(BegunRecord("run", rules, msgspec.to_builtins(Outer()), TENSORS, "plan"))


def in_first_phase() -> History:
    run = phased(WARM)
    settings = run.settings.in_phase(1, run.begun.settings)
    run.apply(ChangedRecord(settings, {**run.outer, "lr": 1.0}, "phase 1", training_phase=1))
    return run


@pytest.mark.parametrize(
    "word", ["sync_every=4", "overlap=0", "adopt=blend", "outer_lr=0.5", "merge=mean", "cut_every=3"]
)
def test_what_a_phase_governs_is_said_to_hold_until_the_next(word: str) -> None:
    asked = parse_changes(in_first_phase(), [word])
    assert asked is not None and asked.what == f"{word} (until phase 2 of 2 begins, at 0.5 of the run)"
    last = parse_changes(phased(), [word])
    assert last is not None and last.what == word, "without phases it holds to the end"


def test_other_settings_are_of_no_phase() -> None:
    asked = parse_changes(in_first_phase(), ["quorum=2"])
    assert asked is not None and asked.what == "quorum=2"


def test_new_phases_take_the_place_of_all_and_the_runs_own_settings_are_as_it_began() -> None:
    run = in_first_phase()
    asked = parse_changes(run, ["phases=[{until = 0.7, sync_every = 3, overlap = 1}]"])
    assert asked is not None
    assert [(one.until, one.sync_every, one.adopt) for one in asked.settings.phases] == [
        (0.7, 3, "overwrite"),
        (1.0, 8, "overwrite"),
    ]
    assert asked.settings.phased_values == run.settings.phased_values, "those of the phase hold until the next begins"
    run.apply(ChangedRecord(asked.settings, asked.outer, asked.what))
    assert run.training_phase == 0, "of the new ones none has begun"


def test_carry_may_be_new_to_a_run_that_goes_on() -> None:
    by_hand = parse_changes(phased(), ["adopt=carry"])
    assert by_hand is not None and by_hand.settings.adopt == "carry"
    phases = parse_changes(phased(), ["phases=[{until = 0.5, adopt = 'carry'}]"])
    assert phases is not None and [one.adopt for one in phases.settings.phases] == ["carry", "overwrite"]


def test_without_any_phase_the_runs_own_settings_hold() -> None:
    asked = parse_changes(in_first_phase(), ["phases=[]"])
    assert asked is not None
    [one] = asked.settings.phases
    assert (one.until, one.sync_every, one.overlap, one.adopt) == (1.0, 8, 2, "overwrite")


def test_a_change_that_waits_is_not_lost_by_the_next() -> None:
    run = phased()
    first = parse_changes(run, ["sync_every=4"])
    assert first is not None
    second = parse_changes(run, ["quorum=2"], before=first)
    assert second is not None
    both = second.behind(first)
    assert (both.settings.sync_every, both.settings.quorum, both.what) == (4, 2, "sync_every=4 quorum=2")


@pytest.mark.parametrize(
    ("run", "words", "said"),
    [
        (phased(), ["adopt=nonsense"], "adopt = 'nonsense' is not known"),
        (phased(), ["phases=[{until = 0.5, merge = 'nonsense'}]"], "merge = 'nonsense' is not known"),
        (phased(), ["phases=[{until = 0.5, sync_every = 2}]"], "overlap = 2 is not below sync_every = 2"),
        (phased(steps=0), ["phases=[{until = 0.5}]"], "needs a budget"),
        (phased(), ["sync_every=2"], "overlap = 2 is not below sync_every = 2"),
        (phased(), ["phases=[{until = 0.5}]", "outer_lr=0.5"], "outer_lr and phases at once"),
        (phased(), ["warm_start=0.5"], "'warm_start' cannot change while a run goes on"),
        (phased(synchronous=True), ["sync_every=4"], "sync_every of a synchronous run cannot change"),
        (phased(synchronous=True), ["adopt=carry"], "adopt of a synchronous run cannot change"),
        (phased(synchronous=True), ["phases=[{until = 0.5}]"], "phases of a synchronous run cannot change"),
    ],
)
def test_what_cannot_change_is_refused_with_its_reason(run: History, words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_changes(run, words)
