"""Every way in which a run can end × every way to go on with it, in real processes.

What a user expects of each cell:

| the run | `train --resume`, `--set evaluate_every=0`, `syncer --resume` | more `--steps` / `--tokens` | `--standby` |
| --- | --- | --- | --- |
| has budget left (Ctrl-C, drained, failed, supervisor killed) | trains on | trains on | refused: it is over |
| was killed as a whole | trains on | trains on | takes over and trains on |
| spent its budget | refused in one line, nothing touched | trains on if that was raised | refused: it is over |
| spent it and was killed while it ended | comes to its end | trains on | takes over and comes to its end |
| spent it and lost its model | gets its model again | trains on | refused: it is over |

`--from-cut` makes a new run of every one of them, and leaves the old one as it is to the byte. After every end that a
run comes to, model.safetensors is the head that the journal gives: `verify` compares the two.

The table belongs to `make faults`. One cell of it, more steps for a run that spent its own, is in every run of the
tests: `test_resume.py`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.system.conftest import SCRIPTS, WAIT_S, Event, Run, members

from atoll.config import load
from atoll.launch.resume import model_is_head, spent_budget
from atoll.protocol.history import History
from atoll.protocol.records import ChangedRecord, MergedRecord
from atoll.store.cuts import complete_cuts
from atoll.store.disk import LocalDisk
from atoll.store.head import read_head
from atoll.store.journal import read
from atoll.store.rundir import RunDir
from atoll.store.verify import verify_run

pytestmark = [pytest.mark.system, pytest.mark.faults, pytest.mark.timeout(900)]

SCRIPT = SCRIPTS / "ended.py"
SETTINGS = """
[protocol]
learners = 2
fragments = 2
sync_every = 4
overlap = 1
cut_every = 20
"""
FEW, ENOUGH, MORE = 80, 300, 60
"""Steps: of a run that spends them, of one that is ended before, and how many more it is given."""
TOKENS, MORE_TOKENS, MANY_TOKENS = 4_000, 8_000, 10_000_000


def cut_is_made(events: list[Event]) -> bool:
    """And both learners are in the run: one may start much later than the other."""
    return any(e["kind"] == "cut" and e["cut"] >= 20 for e in events) and len(members(events)) == 2


def train(run: Run, *words: object, script: tuple[object, ...] = ()) -> Run:
    settings = run.folder / "settings.toml"
    settings.write_text(SETTINGS)
    command = (SCRIPT, "--config", settings, "--set", "evaluate_every=20", *words, "--", *script)
    return run.train(*map(str, command))


def train_to_cut(run: Run, *script: object) -> None:
    """Up to its first cut, and slowly from there: there is time to end it before its budget is spent."""
    (run.folder / "slow").touch()
    train(run, "--steps", ENOUGH, script=("--slow", run.folder / "slow", *script)).until(cut_is_made)


def learners_by_hand(run: Run, url: str, *script: object) -> list[subprocess.Popen[str]]:
    return [
        run.beside(
            *("learn", SCRIPT, "--syncer", url, "--name", name, "--folder", run.out / "learners" / name),
            *("--", *map(str, script)),
        )
        for name in ("learner-0", "learner-1")
    ]


def said_once(run: Run, words: str) -> None:
    assert run.stdout.count(words) == 1, run.stdout


# ---- how it ends -----------------------------------------------------------------------------------------------------


def steps_spent(run: Run) -> None:
    train(run, "--steps", FEW).ended()


def tokens_spent(run: Run) -> None:
    train(run, "--tokens", TOKENS).ended()


def train_interrupted(run: Run) -> None:
    train_to_cut(run)
    run.interrupt()
    run.ended()
    said_once(run, f"It goes on with:\n  atoll train --resume {run.out.relative_to(run.folder)}")


def syncer_interrupted(run: Run) -> None:
    settings = run.folder / "settings.toml"
    settings.write_text(SETTINGS)
    run.start("syncer", "--config", settings, "--steps", str(ENOUGH), "--port", "0", "--out", run.out)
    (run.folder / "slow").touch()
    learners = learners_by_hand(run, run.address(), "--slow", run.folder / "slow")
    run.until(cut_is_made)
    run.interrupt()
    run.ended()
    said_once(run, f"It goes on with:\n  atoll syncer --resume {run.out.relative_to(run.folder)}")
    assert [learner.wait(WAIT_S) for learner in learners] == [0, 0]


def supervisor_killed(run: Run) -> None:
    train_to_cut(run)
    os.kill(run.pid_of_command(), signal.SIGKILL)
    run.until_gone(WAIT_S)


def everything_killed(run: Run) -> None:
    train_to_cut(run)
    run.kill_everything()


def everybody_drained(run: Run) -> None:
    train_to_cut(run)
    for learner in ("learner-0", "learner-1"):
        assert run.command("drain", learner, "--run", run.out).returncode == 0
    run.ended()
    assert run.summary["reason"] == "every learner has ended"


def every_learner_failed(run: Run) -> None:
    trouble = run.folder / "trouble"
    train_to_cut(run, "--trouble", trouble)
    trouble.touch()
    run.ended(code=2)
    assert "trouble is there: take it away" in run.stderr
    trouble.unlink()


def killed_at_its_end(run: Run) -> None:
    deaf = run.folder / "deaf"
    deaf.touch()
    train(run, "--steps", FEW, script=("--deaf", deaf)).until(lambda events: any(e["kind"] == "ending" for e in events))
    run.kill_everything()
    deaf.unlink()


def model_lost(run: Run) -> None:
    steps_spent(run)
    (run.out / "model.safetensors").unlink()


ENDS: dict[str, Callable[[Run], None]] = {
    one.__name__: one
    for one in (
        *(steps_spent, tokens_spent, train_interrupted, syncer_interrupted, supervisor_killed, everything_killed),
        *(everybody_drained, every_learner_failed, killed_at_its_end, model_lost),
    )
}
SPENT = {"steps_spent": "more_steps", "tokens_spent": "more_tokens"}
"""Which way gives more of what is spent."""
HALF_ENDED = {"killed_at_its_end", "model_lost"}


# ---- how it goes on --------------------------------------------------------------------------------------------------


def resume(run: Run, *words: object) -> None:
    script = (SCRIPT,) if load(run.out / "run.toml").by_hand else ()
    run.start("train", *script, "--resume", run.out, *map(str, words))


def more_steps(run: Run) -> None:
    resume(run, "--steps", head_of(run.out).settings.steps + MORE)


def more_tokens(run: Run) -> None:
    resume(run, "--tokens", MORE_TOKENS if (head_of(run.out).settings.tokens) else MANY_TOKENS)


def without_evaluator(run: Run) -> None:
    resume(run, "--set", "evaluate_every=0")


def syncer_by_hand(run: Run) -> None:
    (run.out / "syncer.url").unlink(missing_ok=True)
    run.start("syncer", "--resume", run.out, "--port", "0")
    if expected(run) == "trains":
        run.by_hand = learners_by_hand(run, run.address())  # type: ignore[attr-defined]


def standby(run: Run) -> None:
    (run.out / "syncer.url").unlink(missing_ok=True)
    run.start("syncer", "--standby", run.out, "--port", "0")
    if expected(run) == "trains":
        run.by_hand = learners_by_hand(run, run.address())  # type: ignore[attr-defined]


def from_cut(run: Run) -> None:
    cut = min(cut for cut in complete_cuts(run.out / "cuts") if cut > 0)
    resume(run, "--from-cut", cut, "--out", run.folder / "other")


WAYS: dict[str, Callable[[Run], None]] = {
    one.__name__: one for one in (resume, more_steps, more_tokens, without_evaluator, syncer_by_hand, standby, from_cut)
}


def expectation(end: str, way: str) -> str:
    """What becomes of a cell: it `trains`, it is `refused`, or it `ends` without training."""
    if way == "from_cut":
        return "trains"
    if way == "standby":
        return {"everything_killed": "trains", "killed_at_its_end": "ends"}.get(end, "refused")
    if end in SPENT:
        return "trains" if way == SPENT[end] else "refused"
    if end in HALF_ENDED:
        return "trains" if way == "more_steps" else "ends"
    return "trains"


def expected(run: Run) -> str:
    return str(run.expected)  # type: ignore[attr-defined]


# ---- the table -------------------------------------------------------------------------------------------------------

TABLE = [pytest.param(end, way, id=f"{end}-{way}") for end in ENDS for way in WAYS]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run that ended in this way: made once, copied by every cell."""
    made: dict[str, Path] = {}

    def folder_of(end: str) -> Path:
        if end not in made:
            run = Run(tmp_path_factory.mktemp(end))
            try:
                ENDS[end](run)
                run.until_gone(10.0)
            finally:
                run.kill()
                (run.folder / "slow").unlink(missing_ok=True)
            check_well(run.out)
            made[end] = run.out
        return made[end]

    return folder_of


@pytest.mark.parametrize(("end", "way"), TABLE)
def test_every_end_and_every_way_to_go_on(run: Run, ended: Callable[[str], Path], end: str, way: str) -> None:
    shutil.copytree(ended(end), run.out)
    run.expected = expectation(end, way)  # type: ignore[attr-defined]
    before, model = every_byte(run.out), model_of(run.out)
    rounds = head_of(run.out).committed
    WAYS[way](run)
    if expected(run) == "refused":
        check_refused(run, before)
        return
    run.ended()
    for learner in getattr(run, "by_hand", ()):
        assert learner.wait(WAIT_S) == 0
    out = run.folder / "other" if way == "from_cut" else run.out
    head = head_of(out)
    check_well(out)
    assert head.finished and spent_budget(head, head.settings), head.ended
    assert model_is_head(RunDir(out), head)
    if expected(run) == "ends":
        assert head.committed - rounds <= head.settings.fragments, "at most the last cycle"
        return
    check_trained(out, rounds if way != "from_cut" else 0)
    assert model_of(out) != model
    if way == "from_cut":
        assert every_byte(run.out) == before, "the old run is left alone"
    else:
        check_events(run, rounds)


# ---- what is checked -------------------------------------------------------------------------------------------------


def every_byte(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def model_of(out: Path) -> bytes | None:
    path = out / "model.safetensors"
    return path.read_bytes() if path.exists() else None


def head_of(out: Path) -> History:
    head = read_head(RunDir(out))
    assert head is not None
    return head


def check_well(out: Path) -> None:
    report = verify_run(out)
    assert report.ok, report.problem


def check_refused(run: Run, before: dict[str, bytes]) -> None:
    (run.out / "syncer.url").write_bytes(before["syncer.url"])  # the test took it away, to see a new one
    run.ended(code=2)
    assert run.stderr.startswith("atoll: the run in ") and run.stderr.count("\n") == 1, run.stderr
    assert "give it more with --steps or --tokens" in run.stderr or "--resume" in run.stderr, "the next step"
    assert every_byte(run.out) == before, "nothing is touched"


def check_trained(out: Path, rounds: int) -> None:
    """New rounds, and progress that goes on from where the run was to the whole of its budget."""
    progress: list[float] = []
    for _, record in read(out / "journal", disk=LocalDisk()):
        if isinstance(record, ChangedRecord) and record.reopen:
            progress = []
        elif isinstance(record, MergedRecord) and record.round >= rounds:
            progress.append(record.progress)
    assert len(progress) > 10 and progress == sorted(progress), progress
    assert progress[0] < 0.9 <= progress[-1], progress
    assert rounds == 0 or progress[0] > 0.05, "it does not begin anew"


def check_events(run: Run, rounds: int) -> None:
    numbers = [e["round"] for e in run.events("round", "passed")]
    assert numbers == sorted(set(numbers)), "every round once"
    new = [e for e in run.events("round") if e["round"] >= rounds]
    assert {name for name, _ in members(new)} == {"learner-0", "learner-1"}
    assert all(incarnation > 1 for _, incarnation in members(new)), "processes of its own"
    assert run.summary["reason"] == head_of(run.out).ended
