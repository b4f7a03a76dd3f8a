"""Atoll without the packages of its extras: what works, and what is said where one is missing. That modules do not
import them is tests/architecture/test_torch_stays_out.py's to prove."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from atoll.extras import EXTRAS, explained, install_command, read_origin

ROOT = Path(__file__).parents[1]
WITHOUT = {"ATOLL_TEST_WITHOUT": ",".join(EXTRAS)}


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Where no package of an extra is installed."""
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, **WITHOUT, "COLUMNS": "200"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


# One process for all of them: each would spend a second on imports.
ONE_BY_ONE = """
import json, sys
from atoll.cli import main
for line in json.loads(sys.argv[1]):
    print("$", line, flush=True)
    print("$", line, file=sys.stderr, flush=True)
    sys.argv = ["atoll", *line.split()]
    try:
        main()
    except SystemExit as end:
        print("exit", end.code, flush=True)
"""


def commands(folder: Path, *lines: str) -> dict[str, tuple[str, str]]:
    """What each of them said, on stdout and on stderr."""
    done = python(folder, "-c", ONE_BY_ONE, json.dumps(lines))
    assert done.returncode == 0, done.stderr
    out, err = (dict(part.split("\n", 1) for part in text.split("$ ")[1:]) for text in (done.stdout, done.stderr))
    return {line: (out[line], err[line]) for line in lines}


def test_the_simulators_and_whatever_looks_work_without_any_extra(tmp_path: Path) -> None:
    said = commands(
        tmp_path,
        "simulate goodput --learners 1,2 --chips 512 --profile spot --hours 2 --seeds 1 --rounds 4",
        "simulate faults --seeds 1 --learners 2",
        "simulate bandwidth",
        "simulate upsizing",
        "simulate tape mixed.tape --learners 2 --steps 20",
        f"plan {ROOT / 'examples' / 'regions.toml'}",
        f"chaos {ROOT / 'examples' / 'storm.toml'} --show",
        "ls",
        "cert",
        "tokens add anna --hours 48",
    )
    for line, (out, err) in said.items():
        assert out.strip() and "exit" not in out and not err.strip(), (line, out, err)


def test_what_is_missing_is_said_in_one_line_with_the_command(tmp_path: Path) -> None:
    lacking = {
        "train --demo": ("the built-in GPT needs torch", "torch"),
        "train --algorithm data-parallel": ("the built-in GPT needs torch", "torch"),
        f"chaos {ROOT / 'examples' / 'storm.toml'}": ("the built-in GPT needs torch", "torch"),
        f"compare {ROOT / 'examples' / 'kills.toml'}": ("the built-in GPT needs torch", "torch"),
        "simulate bandwidth --plot bandwidth.html": ("--plot bandwidth.html needs plotly", "plots"),
        "simulate bandwidth --plot bandwidth.png": ("--plot bandwidth.png needs matplotlib", "plots"),
        "train --tensorboard board": ("--tensorboard needs tensorboard", "tracking"),
        "train --wandb mine": ("--wandb needs wandb", "tracking"),
        "train mine.py --on ray": ("--on ray needs ray", "ray"),
        "train mine.py --store file:///nowhere": ("--store needs obstore", "store"),
    }
    (tmp_path / "mine.py").touch()
    said = commands(tmp_path, *lacking)
    for line, (words, extra) in lacking.items():
        told = f"atoll: {words}, which is not installed here: {install_command(extra)}\n"
        assert said[line] == ("exit 2\n", told), line
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"], "nothing is begun"


@pytest.mark.parametrize("name", ["Learner", "attach", "evaluate", "kept_moments"])
def test_a_name_that_needs_torch_says_so_and_can_be_caught(tmp_path: Path, name: str) -> None:
    told = f"atoll.{name} needs torch, which is not installed here: {install_command('torch')}"
    plain = python(tmp_path, "-c", f"import atoll; atoll.{name}")
    assert (plain.returncode, plain.stdout, plain.stderr) == (1, "", f"atoll: {told}\n")
    caught = python(tmp_path, "-c", f"try:\n from atoll import {name}\nexcept ImportError as error:\n print(error)")
    assert (caught.stdout, caught.stderr) == (f"{told}\n", "")


@pytest.mark.parametrize(
    ("name", "extra"), [("hf", "hf"), ("lightning", "lightning"), ("loaders", "torch"), ("jax", "jax")]
)
def test_an_integration_says_so_too(tmp_path: Path, name: str, extra: str) -> None:
    told = python(tmp_path, "-c", f"import atoll.integrations.{name}")
    assert told.stderr.count("\n") == 1 and told.stderr.endswith(f": {install_command(extra)}\n")


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        ({}, "'atoll[torch]'"),
        ({"url": "file://{clone}", "dir_info": {"editable": True}}, "-e '{clone}[torch]'"),
        ({"url": "file://{clone}", "dir_info": {}}, "'{clone}[torch]'"),
        ({"url": "file:///gone/atoll.whl", "archive_info": {}}, "'atoll[torch]'"),
        (
            {"url": "https://example.org/atoll.git", "vcs_info": {"vcs": "git", "commit_id": "9f0c1d2"}},
            "'atoll[torch] @ git+https://example.org/atoll.git@9f0c1d2'",
        ),
        (
            {
                "url": "https://example.org/all.git",
                "vcs_info": {"vcs": "git", "commit_id": "9f0c1d2"},
                "subdirectory": "atoll",
            },
            "'atoll[torch] @ git+https://example.org/all.git@9f0c1d2#subdirectory=atoll'",
        ),
        (
            {"url": "https://example.org/atoll.whl", "archive_info": {}},
            "'atoll[torch] @ https://example.org/atoll.whl'",
        ),
        (
            {"url": "https://example.org/all.tar.gz", "archive_info": {}, "subdirectory": "atoll"},
            "'atoll[torch] @ https://example.org/all.tar.gz#subdirectory=atoll'",
        ),
    ],
    ids=[
        "an index",
        "an editable clone",
        "a clone",
        "a wheel that is gone",
        "a repository",
        "a folder of a repository",
        "a wheel of a host",
        "a folder of an archive",
    ],
)
def test_the_command_installs_from_where_this_one_came(tmp_path: Path, origin: dict[str, Any], words: str) -> None:
    clone = tmp_path / "a clone"
    clone.mkdir()
    if "url" in origin:
        origin = {**origin, "url": origin["url"].replace("{clone}", clone.as_posix().replace(" ", "%20"))}
    assert read_origin(origin, "torch") == words.replace("{clone}", str(clone))


def test_a_package_that_no_extra_has_is_python_s_own_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'somebody_elses'"), explained("atoll.Learner"):
        import somebody_elses  # noqa: F401


def test_other_errors_are_printed_as_before(tmp_path: Path) -> None:
    code = "import atoll\ntry:\n atoll.Learner\nexcept ImportError:\n raise KeyError(7)"
    assert python(tmp_path, "-c", code).stderr.endswith("KeyError: 7\n")


def test_the_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    has = {extra: {re.split(r"[<>=\[]", word)[0] for word in words} for extra, words in extras.items()}
    for package, extra in EXTRAS.items():
        assert package in has[extra]
        assert package not in project["dependencies"]
    users = set(extras) - {"dev", "integrations", "docs", "all"}
    [everything] = extras["all"]
    assert set(everything.removeprefix("atoll[").removesuffix("]").split(",")) == users


def test_a_script_that_imports_what_is_missing_is_told_the_command(tmp_path: Path) -> None:
    for code in ("import torch", "import atoll; atoll.Learner"):
        (tmp_path / "mine.py").write_text(code)
        done = python(tmp_path, "-m", "atoll.launch.script", "mine.py")
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert done.stderr.endswith(f"needs torch, which is not installed here: {install_command('torch')}\n")
