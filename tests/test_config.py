from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from atoll.config import Config, convert, load, merged, parse, parse_settings, parse_shard
from atoll.protocol.errors import ConfigError


def complaint(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, "run.toml")
    assert "\n" not in str(caught.value) or "not TOML" in str(caught.value)
    return str(caught.value)


def test_an_empty_file_is_a_good_run() -> None:
    assert parse("", "x") == Config()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sed = 1", "run.toml: unknown key 'sed': did you mean seed, service or scavenge?"),
        (
            "[protocol]\nqorum = 1",
            "run.toml: unknown key [protocol] 'qorum': did you mean quorum, quorum_policy or overlap?",
        ),
        ("[outer]\nmomentun = 1", "run.toml: unknown key [outer] 'momentun': did you mean momentum, merge or robust?"),
        (
            "[service]\nzzz = 1",
            "run.toml: unknown key [service] 'zzz': did you mean tail_average, store or share_files?",
        ),
        ("[protcol]\nquorum = 1", "run.toml: unknown key 'protcol': did you mean protocol, outer or service?"),
    ],
)
def test_an_unknown_key_is_named_with_its_neighbour(text: str, said: str) -> None:
    assert complaint(text) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[protocol]\nlearners = 'two'", "run.toml: [protocol] learners: expected int, got str"),
        ("seed = 1.5", "run.toml: seed: expected int, got float"),
        ("protocol = 3", "run.toml: protocol: expected object, got int"),
    ],
)
def test_a_wrong_type_is_named_with_its_place(text: str, said: str) -> None:
    assert complaint(text) == said


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            "[protocol]\nlearners = 2\nquorum = 3",
            "quorum = 3 can never be reached by 2 learners: set quorum to 2 or less",
        ),
        ("[protocol]\nblend = 1.5", "blend = 1.5 is not between 0 and 1"),
        ("[outer]\nnorm_limit = 0.5", "norm_limit = 0.5 must be above 1"),
        ("[outer]\nlr = -1.0", "outer learning rate -1.0 must be a number above 0"),
        ("[service]\nport = 70000", "port = 70000 is not between 0 and 65535"),
        ("[service]\nevaluate_every = -1", "evaluate_every = -1 is below 0"),
        (
            '[outer]\nrobust = true\nmerge = "rda"\n[service]\nshards = 2',
            'robust with merge = "rda" is for a syncer of one process, and shards = 2',
        ),
        ('[protocol]\nguard = "rollback"\n[service]\nshards = 2', 'guard = "rollback" is for a syncer of one process'),
        ("[service]\nshards = 0", "shards = 0: a syncer has 1 to 64 of them"),
        ("[service]\ntail_average = 1", "tail_average = 1 averages nothing: 0 leaves it, 2 is the least"),
        ("[service]\ntail_average = 4\n[protocol]\nkeep_cuts = 2", "keep_cuts = 2 is too few"),
        ("seed = -1", "seed = -1 is below 0"),
    ],
)
def test_a_value_out_of_range_is_named_with_the_fix(text: str, part: str) -> None:
    assert part in complaint(text)


def test_what_is_not_toml_is_said_to_be_so() -> None:
    assert complaint("[protocol").startswith("run.toml is not TOML")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml"):
        load(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"cannot read .*bytes\.toml"):
        load(tmp_path / "bytes.toml")


def test_settings_survive_the_way_to_toml_and_back(tmp_path: Path) -> None:
    document: dict[str, Any] = {
        "seed": 7,
        "protocol": {"learners": 8, "quorum": 3, "overlap": 1, "adopt": "carry"},
        "outer": {"merge": "rda-row", "lr": math.pi},
        "service": {"port": 7077},
        "workload": {"data": ["a b.txt", 'quo"ted'], "depth": 3, "nested": {"x": None}},
    }
    config = convert(document, "x")
    path = tmp_path / "run.toml"
    path.write_bytes(config.toml())
    document["workload"]["nested"] = {}
    assert load(path) == convert(document, "x")
    assert load(path).outer.lr == math.pi


def test_phases_stand_at_the_top_and_survive_the_way_to_toml(tmp_path: Path) -> None:
    text = "[[phases]]\nuntil = 0.1\nsync_every = 3\nmerge = 'mean'\n[[phases]]\nuntil = 0.4\nouter_lr = 0.5\n"
    config = parse(text, "x")
    assert [(one.until, one.sync_every, one.merge, one.outer_lr) for one in config.protocol.phases] == [
        (0.1, 3, "mean", None),
        (0.4, None, None, 0.5),
    ]
    path = tmp_path / "run.toml"
    path.write_bytes(config.toml())
    assert load(path) == config


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[[phases]]\nuntil = 0.1\nmerge = 'median'", "merge"),
        ("[[phases]]\nuntil = 0.1\nadopt = 'half'", "adopt"),
        ("[[phases]]\nsync_every = 2", "until"),
        ("[[phases]]\nuntil = 0.1\nh = 2", "unknown key [phases] 'h': did you mean until, sync_every or overlap?"),
        (
            "[[phases]]\nuntil = 0.1\nsync_evry = 2",
            "unknown key [phases] 'sync_evry': did you mean sync_every, merge or overlap?",
        ),
        ("[[phases]]\nuntil = 0.1\n[[protocol.phases]]\nuntil = 0.3", "phases stand at the top and in [protocol]"),
        ("[protocol]\nwarm_start = 0.1\n[[phases]]\nuntil = 0.1", "warm_start is a phase of its own"),
    ],
)
def test_a_phase_that_cannot_be_is_named(text: str, part: str) -> None:
    assert part in complaint(text)


def test_phases_of_the_command_line_go_on_top_of_those_of_a_file() -> None:
    document = {"phases": [{"until": 0.1, "sync_every": 8}]}
    said = convert(merged(document, parse_settings(["phases=[{until=0.3,sync_every=6}]"])), "x").protocol.phases
    assert [(one.until, one.sync_every) for one in said] == [(0.3, 6)]
    assert [one.until for one in convert(merged(document, {}), "x").protocol.phases] == [0.1]


def test_the_command_line_goes_on_top_and_none_says_nothing() -> None:
    document = {"seed": 1, "protocol": {"quorum": 2, "learners": 4}}
    result = merged(document, {"protocol": {"quorum": 3, "steps": None}, "outer": {"lr": None}, "service": {"port": 0}})
    assert result == {"seed": 1, "protocol": {"quorum": 3, "learners": 4}, "service": {"port": 0}}
    assert document == {"seed": 1, "protocol": {"quorum": 2, "learners": 4}}, "and the document stays as it was"


def test_a_table_that_is_none_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="protocol: expected object, got int"):
        convert(merged({"protocol": 3}, {"protocol": {"steps": 5}}), "x")


def test_a_shard_is_named_by_its_number_of_how_many() -> None:
    assert parse_shard("2/3") == (2, 3)
    for wrong in ("2", "0/2", "3/2", "1/0", "a/b", "1/65", "1/2/3", "²/2"):
        with pytest.raises(ConfigError, match="write it as 2/3, the second of three"):
            parse_shard(wrong)
