"""Learners of several ranks in a run whose syncer has several shards: real processes, gloo on the CPU."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from tests.system.conftest import SCRIPTS, WAIT_S, Run, members
from tests.system.test_ranks import find_rank, start_ranks
from tests.system.test_shards import check_clean, compile_codec, count_rounds

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

SETTINGS = """[protocol]
learners = {learners}
steps = {steps}
fragments = 2
sync_every = 2
overlap = 1
synchronous = true
wait_for_learners_s = 240
codec = "{codec}"
"""
MIXED = {"learner-0": ("fsdp", 2), "learner-1": ("plain", 1)}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts train a net of which shards cut a tensor."""
    monkeypatch.setenv("WIDE", "1")


def train(
    run: Run, name: str, shards: int, layouts: dict[str, tuple[str, int]], codec: str = "fp32", steps: int = 4
) -> dict[str, torch.Tensor]:
    """The model of a synchronous run of these learners, whose syncer has so many shards."""
    out = run.out = run.folder / name
    settings = run.folder / f"{name}.toml"
    settings.write_text(SETTINGS.format(learners=len(layouts), codec=codec, steps=steps))
    which = ("--shard", f"1/{shards}") if shards > 1 else ()
    run.start("syncer", *which, "--config", settings, "--out", out, "--port", str(run.free_port()))
    url = run.address()
    others = [
        run.beside(
            "syncer", "--shard", f"{n}/{shards}", "--join", url, "--out", out / "shards" / str(n),
            "--port", str(run.free_port()),
        )
        for n in range(2, shards + 1)
    ]  # fmt: skip
    ranks = [one for who, (layout, size) in layouts.items() for one in start_ranks(run, who, layout, size)]
    said = [one.communicate(timeout=WAIT_S)[1] for one in ranks]
    assert all(one.returncode == 0 for one in ranks), "\n".join(said)
    run.ended()
    assert all(other.wait(30) == 0 for other in others)
    check_clean(run)
    return dict(load_file(out / "model.safetensors"))


def check_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)


def test_ranks_and_a_plain_learner_over_two_shards_have_the_bits_of_one(run: Run) -> None:
    """Two ranks with uneven parts; the shards cut a tensor of theirs between two of its rows."""
    both = train(run, "both", 2, MIXED)
    assert sum(path.stat().st_size for path in (run.out / "shards" / "2" / "journal").rglob("*.bin")) > 0
    check_equal(both, train(Run(run.folder), "alone", 1, MIXED))


@pytest.mark.faults
@pytest.mark.parametrize("codec", ["bf16", "int4"])
@pytest.mark.parametrize(
    "layouts",
    [MIXED, {"learner-0": ("fsdp-tp", 4)}, {"learner-0": ("hsdp", 4), "learner-1": ("ddp", 2)}],
    ids=lambda layouts: "+".join(layout for layout, _ in layouts.values()),
)
def test_no_bit_depends_on_the_number_of_shards(run: Run, layouts: dict[str, tuple[str, int]], codec: str) -> None:
    compile_codec(codec)
    alone = train(run, "alone", 1, layouts, codec, steps=12)
    for shards in (2, 3):
        check_equal(alone, train(Run(run.folder), f"{shards}-shards", shards, layouts, codec, steps=12))


@pytest.mark.faults
def test_a_killed_rank_and_a_killed_shard_lose_nothing(run: Run) -> None:
    given = ("--learners", "2", "--ranks", "2", "--syncer-shards", "2", "--steps", "400", "--set", "cut_every=12")
    given += ("--set", "fragments=6", "--set", "sync_every=12", "--set", "overlap=2", "--set", "evaluate_every=0")
    run.train(SCRIPTS / "ranks.py", *given, "--", "fsdp", "0.1")
    run.until(lambda events: any(e["kind"] == "cut" and e.get("learners") for e in events))
    os.kill(find_rank(run, "learner-1", 1), signal.SIGKILL)
    run.until(lambda events: ("learner-1", 2) in members(events))
    os.kill(run.pid("shard-2"), signal.SIGKILL)
    run.until(lambda events: any(e["kind"] == "alarm" and e["over"] for e in events))
    back = next(e["at"] for e in run.events("alarm") if e["over"])
    run.until(lambda events: count_rounds(events, since=back) >= 6)
    assert {"learner-0", "learner-1"} <= {who for who, _ in members([e for e in run.events() if e["at"] > back])}
    run.ended()
    assert run.summary["tokens"]["in_flight"] == 0
    check_clean(run)
    again = run.command("replay", run.out)
    assert again.returncode == 0 and "bit-identical" in again.stdout, again.stdout + again.stderr
