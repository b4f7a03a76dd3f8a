"""Plans of faults: read, drawn, and what they must not be."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w

from atoll.chaos.inject import Injector
from atoll.chaos.plan import KINDS, FaultPlan, load_plan, parse_plan
from atoll.protocol.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"
FOUR: dict[str, Any] = {"seconds": 60.0, "config": {"protocol": {"learners": 4}}}


def plan(**more: Any) -> FaultPlan:
    return parse_plan({**FOUR, **more}, "plan.toml")


def fault(**more: Any) -> dict[str, Any]:
    return {"kind": "kill", "target": "learner-1", "at_s": 20.0, **more}


def test_the_same_plan_and_seed_are_the_same_faults() -> None:
    rates = {"kill": 600.0, "pause": 300.0, "syncer-kill": 120.0}
    assert (
        plan(rates=rates, seed=3).list_faults()
        == plan(rates=rates, seed=3).list_faults()
        != plan(rates=rates, seed=4).list_faults()
    )


def test_the_storm_has_at_least_sixty_faults_of_every_kind() -> None:
    storm = load_plan(EXAMPLES / "storm.toml")
    kinds = Counter(one.kind for one in storm.list_faults())
    assert len(storm.list_faults()) >= 60 and set(kinds) == set(KINDS)
    assert storm.seconds == 300 and storm.config.protocol.learners == 8


@pytest.mark.parametrize("seed", range(20))
def test_drawn_faults_begin_and_end_inside_and_leave_half_of_the_learners_alone(seed: int) -> None:
    storm = msgspec.structs.replace(load_plan(EXAMPLES / "storm.toml"), seed=seed)
    for one in storm.list_faults():
        assert one.at_s is not None and storm.settle_s <= one.at_s <= storm.seconds - storm.settle_s
        during = [
            other
            for other in storm.list_faults()
            if other.at_s is not None and other.at_s <= one.at_s <= other.at_s + max(1.0, other.for_s)
        ]
        hit = {name for other in during for name in other.targets if name.startswith("learner-")}
        assert len(hit) <= 4


def test_every_kind_of_fault_can_be_done() -> None:
    assert set(Injector._ways) == set(KINDS)


def test_a_plan_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(tomli_w.dumps({**FOUR, "fault": [fault(), fault(kind="pause", at_round=9, for_s=2.0, at_s=30.0)]}))
    with pytest.raises(ConfigError, match="one of at_s, at_round and at_event"):
        load_plan(file)
    file.write_text(tomli_w.dumps({**FOUR, "fault": [fault(at_s=40.0), fault(kind="reset", at_s=5.0)]}))
    assert [one.describe() for one in load_plan(file).list_faults()] == [
        "5.0 s reset learner-1",
        "40.0 s kill learner-1",
    ]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"fault": [fault(kind="meteor")]}, "there is no fault 'meteor'"),
        ({"rates": {"meteor": 5.0}}, "there is no fault 'meteor'"),
        ({"rates": {"kill": -1.0}}, "from 0 to 36000"),
        ({"fault": [fault(target="learner-9")]}, "there is no 'learner-9'; learners are learner-0 to learner-3"),
        ({"fault": [fault(target=[])]}, "kill needs a target"),
        ({"fault": [fault(at_s=60.0)]}, "at_s = 60 lies past the end, the plan is over at 60 s"),
        ({"fault": [fault(at_s=-1.0)]}, "lies past the end"),
        ({"fault": [fault(kind="pause")]}, "for_s = 0 must be above 0"),
        ({"fault": [fault(kind="slow", for_s=3.0)]}, "slow needs a size above 0"),
        ({"fault": [fault(kind="syncer-kill", target="learner-1")]}, "syncer-kill happens to the syncer"),
        ({"fault": [fault(target=f"learner-{n}", at_s=20.5) for n in range(4)]}, "every learner is gone at once"),
        ({"fault": [fault(kind="pause", target=f"learner-{n}", at_s=20 + n, for_s=9.0) for n in range(4)]}, "at once"),
        ({"seconds": 0.0}, "seconds = 0 must be from 1 to 86400"),
        ({"seconds": float("nan")}, "must be from 1 to 86400"),
        ({"settle_s": 40.0, "rates": {"kill": 60.0}}, "leaves no time for faults"),
        ({"verdict": {"goodput": -1.0}}, "must be a number of 0 or more"),
        ({"verdict": {"beauty": 1.0}}, "unknown field `beauty`"),
        ({"config": {"protocol": {"learner": 3}}}, "did you mean learners, plan or wait_for_learners_s?"),
        ({"config": 3}, "config must be a table"),
        ({"colour": "red"}, "unknown field `colour`"),
    ],
)
def test_what_a_plan_must_not_be_is_said_in_one_line(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan(**more)
    assert said in str(error.value) and "\n" not in str(error.value) and str(error.value).startswith("plan.toml")


def test_a_file_that_is_not_there_or_no_plan_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the plan"):
        load_plan(tmp_path / "nowhere.toml")
    (tmp_path / "bad.toml").write_text("seed = = 3")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_plan(tmp_path / "bad.toml")
