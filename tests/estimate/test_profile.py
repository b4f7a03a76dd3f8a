"""Profiles: by name, out of a file, with other values, and what is wrong with one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import tomli_w

from atoll.estimate.profile import Profile, keys, load, named, parse, with_values
from atoll.protocol.errors import ConfigError


def test_every_profile_says_where_its_numbers_come_from() -> None:
    assert named() == ["paper", "spot"]
    for name in named():
        assert len(load(name).provenance) > 20
    assert "not its authors' values" in load("paper").provenance


def test_a_profile_written_down_is_read_back_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(tomli_w.dumps(msgspec.to_builtins(load("spot"))))
    assert load(str(file)) == load("spot")


def test_any_key_can_be_set() -> None:
    profile = with_values(load("paper"), {"preemption.every_s": 7200.0, "step_s": 3, "slices": None})
    assert profile.preemption.every_s == 7200.0 and profile.step_s == 3.0 and profile.slices == 1024
    assert "elasticity.outage_s" in keys(profile) and "step_s" in keys(profile)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step_s = 0", "step_s = 0"),
        ("step_s = -1", "step_s = -1"),
        ("step_s = inf", "step_s = inf"),
        ("step_s = nan", "step_s = nan"),
        ("slices = 0", "slices = 0"),
        ("slices = 1.5", "Expected `int`"),
        ("pace_s = 1", "unknown field `pace_s`"),
        ("[failures]\nscale_s = 0", "failures.scale_s = 0"),
        ("[preemption]\nevery_s = -5", "every_s = -5"),
        ("[scavenged]\nlearners = 2\nfrom_h = 8\nto_h = 8", "two different hours"),
        ("[racks]\nslices = 5000", "racks.slices = 5000 is more than all 1024 slices"),
        ("[regions]\ncount = 0", "regions.count = 0"),
        ("step_s", "profile mine"),
    ],
)
def test_what_is_wrong_with_a_profile_is_said_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text, "mine")
    assert said in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_name_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no profile 'papr': take paper or spot"):
        load("papr")
    with pytest.raises(ConfigError, match="cannot read profile"):
        load("nowhere.toml")
    with pytest.raises(ConfigError, match=r"has no 'elasticity\.sideways_s': it has provenance, step_s"):
        with_values(Profile(), {"elasticity.sideways_s": 1.0})
