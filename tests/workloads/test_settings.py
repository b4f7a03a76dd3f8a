"""The [workload] table: defaults, one-line errors that name the key, and the schedule it drives."""

import subprocess
import sys
from pathlib import Path

import pytest

from atoll.protocol.errors import ConfigError
from atoll.workloads.settings import WorkloadSettings, read_run
from atoll.workloads.training import learning_rate


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("depth", 0),
        ("block", -1),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("floor", 2.0),
        ("betas", (0.9, 1.0)),
        ("pace_s", -1.0),
        ("optimizer", "Adam"),
    ],
)
def test_a_value_that_cannot_be_names_its_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^workload\.{key} is .*; set it to "):
        WorkloadSettings(**{key: value})


def test_read_run_takes_its_table_and_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('seed = 7\n[workload]\ndepth = 3\ndata = ["a.txt"]\n[syncer]\nport = 1\n')
    assert read_run(path) == (WorkloadSettings(depth=3, data=("a.txt",)), 7)


@pytest.mark.parametrize("table", ["dept = 3", 'depth = "three"', "depth = 0"])
def test_a_wrong_table_is_one_line(tmp_path: Path, table: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[workload]\n{table}\n")
    with pytest.raises(ConfigError, match="dept") as caught:
        read_run(path)
    assert "\n" not in str(caught.value)


def test_a_missing_run_toml_says_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ATOLL_RUN_TOML"):
        read_run(tmp_path / "run.toml")


def test_settings_do_not_import_torch() -> None:
    code = "import sys, atoll.workloads.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_learning_rate_rises_falls_and_ends_at_its_floor() -> None:
    assert learning_rate(0.1, 2.0, warmup=0.1, floor=0.25) == pytest.approx(2.0)
    assert learning_rate(0.05, 2.0, warmup=0.1, floor=0.25) == pytest.approx(1.0)
    assert 0 < learning_rate(0.0, 2.0, warmup=0.1) < 0.1
    assert learning_rate(1.0, 2.0, warmup=0.1, floor=0.25) == learning_rate(9.0, 2.0, floor=0.25) == pytest.approx(0.5)
    falling = [learning_rate(p / 100, 1.0) for p in range(3, 101)]
    assert falling == sorted(falling, reverse=True)
    assert learning_rate(0.0, 1.0, warmup=0.0) == 1.0
