"""What an operator may change while a run goes on, and how a mistake is told."""

from __future__ import annotations

import msgspec
import pytest
from tests.syncer.conftest import TENSORS

from atoll.config import Outer
from atoll.protocol.errors import ConfigError
from atoll.protocol.history import History
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


@pytest.mark.parametrize("key", RULES)
def test_every_rule_that_may_change_is_a_setting_of_its_kind(key: str) -> None:
    before = history()
    value = {"quorum": "3", "quorum_policy": "minimum", "grace_share": "0.25", "guard": "rollback"}.get(key, "7")
    asked = parse_changes(before, [f"{key}={value}"])
    assert asked is not None
    now, was = msgspec.to_builtins(asked.settings), msgspec.to_builtins(before.settings)
    assert {name for name in now if now[name] != was[name]} == {key}
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
        ("=2", "there is no setting '': known are seed, init, learners"),
        ("qorum=2", "there is no setting 'qorum': did you mean quorum or quorum_policy?"),
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
        ("weight_limit.=2", "there is no setting 'weight_limit.': did you mean weight_limit or norm_limit?"),
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
