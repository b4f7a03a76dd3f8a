"""What an operator can get wrong: one line that names the thing and the fix, exit code 2, nothing left behind."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from tests.system.conftest import SCRIPTS, Run

pytestmark = pytest.mark.system

LINE = (SCRIPTS / "line.py", "--learners", "2", "--set", "evaluate_every=0")


def complaint(run: Run) -> str:
    run.ended(code=2)
    assert run.stderr.startswith("atoll: ") and run.stderr.count("\n") == 1, run.stderr
    assert "Traceback" not in run.stdout
    return run.stderr


@pytest.mark.faults
def test_more_fragments_than_rows(run: Run) -> None:
    text = complaint(run.train(*LINE, "--set", "fragments=9"))
    assert "9 fragments" in text and "8 at most, its rows" in text


@pytest.mark.faults
def test_too_little_memory_for_the_shared_buffers(run: Run) -> None:
    text = complaint(run.train(*LINE, "--set", "overlap=1", "--", "--poor"))
    assert "the shared buffers need" in text and "use a smaller model" in text


@pytest.mark.faults
def test_a_dataset_too_small(run: Run) -> None:
    small = run.folder / "small.txt"
    small.write_text("hello")
    text = complaint(run.train("--learners", "2", "--steps", "10", "--set", f"workload.data={small}"))
    assert "small" in text


@pytest.mark.faults
@pytest.mark.parametrize("algorithm", ["decoupled", "data-parallel"])
def test_data_that_is_not_there(run: Run, algorithm: str) -> None:
    text = complaint(
        run.train("--learners", "1", "--steps", "10", "--set", "workload.data=nowhere.txt", "--algorithm", algorithm)
    )
    assert "nowhere.txt" in text


def test_a_port_in_use(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = complaint(run.train(*LINE, "--set", f"port={port}"))
    assert text == f"atoll: port {port} is in use on 127.0.0.1: choose another (--set port=7077), or 0 for any\n"


def test_a_script_that_says_what_is_wrong(run: Run) -> None:
    script: Path = run.folder / "mine.py"
    script.write_text("import sys\nsys.exit('atoll: the tokenizer is missing: run prepare.py first')\n")
    assert complaint(run.train(script, "--learners", "2")) == "atoll: the tokenizer is missing: run prepare.py first\n"
