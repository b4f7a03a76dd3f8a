"""The command line up to the moment a process is started; tests/system has the rest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.observe.conftest import small_run
from tests.store.written import WrittenRun, cut_run, everything, flip

from atoll import __version__, cli
from atoll.choices import CODEC, MERGE
from atoll.cli import look, train
from atoll.cli.runs import state_of
from atoll.cli.shared import close, where
from atoll.launch.local import Kill, LocalRun
from atoll.numerics import kernels
from atoll.protocol.errors import ConfigError, PeerError
from atoll.store.cuts import complete_cuts
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import acquire, hold_run


def atoll(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["atoll", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "80")
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    (tmp_path / "open.txt").write_text("atoll://0123456789abcdef@127.0.0.1:7077/run\n")
    (tmp_path / "open.txt").chmod(0o644)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "events.jsonl").write_text("")
    (tmp_path / "odd.toml").write_text("[protocol]\nqorum = 2\n")
    (tmp_path / "work.toml").write_text("[workload]\ndept = 2\n")
    (tmp_path / "torn.toml").write_text("[protocol\n")
    (tmp_path / "plan.toml").write_text("")
    (tmp_path / "far.toml").write_text("[service]\nkeys = 'atoll-keys'\n")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "train --config odd.toml",
            "odd.toml: unknown key [protocol] 'qorum': did you mean quorum, quorum_policy or overlap?",
        ),
        (
            "train --config work.toml",
            "work.toml, table [workload]: unknown key 'dept': did you mean depth, experts or data?",
        ),
        ("train --config torn.toml", "torn.toml is not TOML"),
        ("train --config far.toml", "[service] keys belongs to atoll syncer, and atoll train starts everything on"),
        ("train --set host=0.0.0.0", "[service] host = 0.0.0.0 belongs to atoll syncer, and atoll train starts"),
        ("train --config none.toml", "cannot read none.toml: No such file or directory"),
        ("train --set quorum=5 --learners 4", "quorum = 5 can never be reached by 4 learners: set quorum to 4 or less"),
        ("train --learners 0", "learners = 0 is too small: the least is 1"),
        ("train --ranks 0", "ranks = 0: a learner has 1 to 4096 of them"),
        ("train --ranks 2 --algorithm data-parallel", "--ranks is for learners of a syncer: leave --tape and --algor"),
        ("train --ranks 2 --tape none.tape", "--ranks is for learners of a syncer: leave --tape and --algorithm out"),
        ("train --ranks 2 --share moments", "--share moments is for learners of one rank: leave it out, or --ranks"),
        ("train --set workload.parallel=tp", "workload.parallel is 'tp'; set it to fsdp or ddp"),
        ("train --share weights", "--share weights: use one of parameters, moments"),
        ("train --share moments --set synchronous=true", 'share = "moments" is for runs that nobody waits in'),
        ("train --share moments --algorithm data-parallel", "there are no moments to share"),
        ("train --set workload.depth=0", "workload.depth is 0"),
        ("train --set workload.optimizer=sgd", "workload.optimizer is 'sgd'; set it to adamw or muon"),
        ("train --set optimizer=muon", "there is no setting 'optimizer': did you mean workload.optimizer?"),
        (
            "train --steps 9 --set phases=[{until=0.1,sync_every=2}]",
            "overlap = 2 is not below sync_every = 2 in the phase until 0.1: a fragment would be read again before it "
            "came back; set overlap = 1 in it",
        ),
        ("train script.py --warm-start 0.1", "phases follow the run's progress, so it needs a budget: set steps"),
        ("syncer --warm-start 0.1", "phases follow the run's progress, so it needs a budget: set steps or tokens"),
        ("train missing.py", "there is no script missing.py: give the path of a Python file"),
        (
            "train --out old",
            "old already holds a run: choose another folder with --out, or replace that run with --force",
        ),
        ("train --kill learner-9@0.5", "there is no such learner; they are learner-0 to learner-3"),
        ("train --kill one@2", "--kill one@2 is not understood: write it as learner-2@0.4"),
        ("train --algorithm data-parallel --warm-start 0.2", "so it has no phases: leave --warm-start and phases out"),
        ("train --set synchronous=true --tokens 9 --warm-start 0.2", "phases of a synchronous run follow its steps"),
        ("train --algorithm data-parallel --set fragments=4", "at every step and has no fragments: leave it out"),
        ("train --algorithm data-parallel --kill learner-1@0.5", "has no learners: leave --tape and --kill out"),
        ("train --set port=70000", "port = 70000 is not between 0 and 65535"),
        ("train --seed -1", "seed = -1 is below 0"),
        ("train --set qorum=2", "there is no setting 'qorum': did you mean quorum, quorum_policy or port?"),
        ("syncer --set qorum=2", "there is no setting 'qorum': did you mean quorum, quorum_policy or port?"),
        ("chaos plan.toml --set qorum=2", "there is no setting 'qorum': did you mean quorum, quorum_policy or port?"),
        ("train --set depth=2", "there is no setting 'depth': did you mean workload.depth?"),
        ("train --set quorum", "'quorum' is not understood: write it as quorum=2"),
        ("train --set quorum=two", "quorum=two: expected int, got str"),
        ("syncer --set quorum=two", "quorum=two: expected int, got str"),
        ("chaos plan.toml --set quorum=two", "quorum=two: expected int, got str"),
        ("train --set merge=nonsense", f"merge = 'nonsense' is not known: use one of {', '.join(MERGE.names())}"),
        ("syncer --set codec=nonsense", f"codec = 'nonsense' is not known: use one of {', '.join(CODEC.names())}"),
        ("chaos plan.toml --set quorum=9", "quorum = 9 can never be reached by 4 learners"),
        (
            "chaos plan.toml --set workload.dept=2",
            "no setting 'workload.dept': did you mean workload.depth, workload.data or",
        ),
        ("train --fragments 4", "atoll train has no option --fragments: it is a setting, --set fragments=VALUE"),
        ("train --depth 4", "atoll train has no option --depth: it is a setting, --set workload.depth=VALUE"),
        (
            "train script.py --lr 0.1 --batch 64",
            "workload.lr is for the built-in GPT; options of your script go after --: "
            "atoll train script.py -- --lr 0.1\n",
        ),
        ("train --lr=0.1 script.py", "options of your script go after --: atoll train script.py -- --lr=0.1\n"),
        (
            "train script.py --epochs 3",
            "did you mean --steps? If not, options of your script go after --: atoll train script.py -- --epochs 3\n",
        ),
        (
            "train script.py 100",
            "atoll train does not know what to do with '100': options of your script go after --: "
            "atoll train script.py -- 100\n",
        ),
        ("train script.py --mine", "atoll train has no option --mine: options of your script go after --: "),
        ("train script.py --fragments 4", "atoll train has no option --fragments: it is a setting, --set fragments="),
        ("learn script.py --epochs --mine", "go after --: atoll learn script.py -- --epochs\n"),
        ("chaos plan.toml script.py --lr 1", "go after --: atoll chaos PLAN script.py -- --lr 1\n"),
        (
            "train script.py --set workload.weight_decay=0.1",
            "workload.weight_decay is for the built-in GPT; options of your script go after --: "
            "atoll train script.py -- --weight-decay 0.1\n",
        ),
        ("train --learner 4", "atoll train has no option --learner: did you mean --learners"),
        ("train --learners", "--learners needs a value: --learners N"),
        ("train --learners four", "--learners four: 'four' is not a whole number"),
        ("train --max-restarts -1", "--max-restarts -1 is too small: the least is 0"),
        ("train --algorithm magic", "--algorithm magic: use one of decoupled, data-parallel"),
        ("train --force=yes", "--force takes no value"),
        ("export run", "atoll export needs OUT: atoll export [OPTIONS] RUN OUT"),
        ("ls here there", "atoll ls does not know what to do with 'there'"),
        ("syncer --port 70000", "port = 70000 is not between 0 and 65535"),
        ("syncer --learners 2 --set quorum=3", "quorum = 3 can never be reached by 2 learners"),
        ("learn missing.py --syncer http://127.0.0.1:1", "there is no script missing.py"),
        ("learn script.py --syncer nowhere", "is no address of a syncer: it looks like http://127.0.0.1:7077"),
        ("learn script.py --syncer http://127.0.0.1:1 --name ../x", "'../x' is no name: use 1 to 64 of a-z"),
        ("syncer --standby s3://bucket/run", "a standby needs the folder that the syncer writes, on a disk that both"),
        ("syncer --resume s3://bucket/run", "comes into one by atoll restore s3://bucket/run DIR"),
        ("status nowhere", "nowhere is not there: name a run's folder, or a file that holds a join link"),
        ("train --from-cut 3", "--from-cut says where to go on, and needs --resume DIR to say with which run"),
        ("train script.py --resume old", "goes on with the run's own script and settings: leave SCRIPT and --config"),
        ("train --config odd.toml --resume old", "with the run's own script and settings: leave SCRIPT and --config"),
        ("train --resume old --out new", "goes on in the run's own folder: --out belongs to --from-cut, for a new run"),
        (
            "train --resume old --set fragments=4",
            "'fragments' cannot change while a run goes on: start a new run for it",
        ),
        (
            "train --resume old --set synchronous=true",
            "'synchronous' cannot change while a run goes on: start a new run for it",
        ),
        (
            "train --resume old --set workload.depth=3",
            "'workload.depth' cannot change while a run goes on: start a new run",
        ),
        ("train --resume old", "old holds no run to go on with: it has no run.toml and journal/"),
        ("train --resume nowhere --from-cut 3", "nowhere holds no run to go on with: it has no run.toml and journal/"),
        ("syncer --resume nowhere", "nowhere holds no run to go on with: it has no run.toml and journal/"),
        ("syncer --standby nowhere", "nowhere holds no run to go on with: it has no run.toml and journal/"),
        ("verify nowhere", "nowhere holds no run that can be verified: there is no journal/ in it"),
        ("export nowhere model.safetensors", "nowhere: atoll ls lists the runs"),
        ("export odl model.safetensors", "old?"),
        ("set nowhere quorum=2", " is not there: name a run's folder, or a file that holds a join link"),
        ("status script.py", "script.py is a file without a join link in it: name a run's folder, the address of its"),
        ("status open.txt", "open.txt can be read by others on this machine: chmod 600 open.txt"),
        ("set nowhere:7077 quorum=2", " is not there: name a run's folder, or a file that holds a join link"),
        ("report nowhere", "nowhere holds no run: name the folder that --out made"),
        ("doctor --syncer nowhere", "nowhere is not there: name a run's folder, or a file that holds a join link"),
        ("replay nowhere", "nowhere holds no run to go on with: it has no run.toml and journal/"),
        ("replay old --jobs -1", "--jobs -1 is below 0; 0 takes one for each core"),
        ("train --tape none.tape", "there is no tape none.tape: make one with atoll simulate tape"),
        ("train --tape script.py", "script.py is not a whole tape: make it again with atoll simulate tape"),
        ("train --tape none.tape --learners 3", "--tape brings learners with it: make another tape for another"),
        ("train --tape none.tape --kill learner-0@0.5", "--tape brings its faults with it"),
        ("train --tape none.tape --resume old", "leave --seed, --kill, --demo, --algorithm, --tape out"),
        ("simulate tape a.tape --steps 0", "--steps 0: a tape needs an end; give it 1 or more"),
        ("simulate tape a.tape --step-s 1,2", "--step-s 1,2: give one number above 0, or 4 of them"),
        ("simulate tape a.tape --step-s fast", "--step-s fast: write seconds, as in 1 or 1,1,2.5"),
        ("simulate tape a.tape --fault melt:learner-0@1+1", "'melt:learner-0@1+1' is not understood"),
        ("simulate tape --profile paper --chips 1M --warm-start 2", "warm_start = 2.0 is no share of the run"),
        ("simulate tape a.tape --quorum 5", "quorum = 5 can never be reached by 4 learners"),
        ("simulate tape a.tape --out b.tape", "a.tape and --out b.tape: name one file to write"),
        ("simulate tape --chips 1.2M", "--chips, --slices and --set are of a cluster: add --profile paper, or leave"),
        ("simulate tape --profile paper", "--profile paper: say how many chips there are that may fail, as in --chips"),
        ("simulate tape --profile papr --chips 1.2M", "there is no profile 'papr': take paper or spot, or a file of"),
        ("simulate tape --profile paper --chips many", "'many' is no number; write 5, 0.5, 1e6, 150k, 1.2M or 7B"),
        ("simulate tape --profile paper --chips 2 --learners 8", "2 chips are too few for 8 learners: each needs at"),
        ("simulate tape --profile paper --chips 1M --learners 5", "1024 slices cannot be dealt evenly to 5 learners"),
        ("simulate tape --profile paper --chips 1M --step-s 1,2", "--step-s '1,2': '1,2' is no number"),
        ("simulate tape --profile paper --chips 1M --steps 0", "--steps 0: a tape needs an end; give it 1 or more"),
        (
            "simulate tape --profile paper --chips 1M --fault crash@6+5",
            "--profile paper draws the faults: leave --fault",
        ),
        ("set http:// quorum=2", "is no address of a syncer: it looks like http://127.0.0.1:7077"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, said: str
) -> None:
    assert atoll(monkeypatch, *command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("atoll: ") and err.count("\n") == 1
    assert said in err
    assert not Path("atoll-runs").exists(), "nothing was begun"


def test_a_drawn_tape_says_its_goodput_and_is_followed_by_as_many_learners_as_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    words = ["--profile", "paper", "--chips", "300k", "--learners", "2", "--steps", "10"]
    assert atoll(monkeypatch, "simulate", "tape", *words, "--out", "drawn.tape") == 0
    told = capsys.readouterr().out
    assert "drawn.tape: " in told and " of 2 learners" in told and "not its authors' values" in told
    assert re.search(r"goodput \d+\.\d %: \d+ of \d+ learner steps", told)
    assert atoll(monkeypatch, "simulate", "tape", *words) == 0
    named = folder / "paper-300000-chips-2-learners-seed-0.tape"
    assert named.read_bytes() == (folder / "drawn.tape").read_bytes()
    (folder / "three.toml").write_text("[protocol]\nlearners = 3\n")
    assert atoll(monkeypatch, "train", "--tape", "drawn.tape", "--config", "three.toml") == 2
    said = "drawn.tape is a tape of 2 learners, the settings ask for 3: leave learners out, or make another tape"
    assert said in capsys.readouterr().err


def test_an_address_where_nobody_answers_says_what_to_name_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert atoll(monkeypatch, "status", "http://127.0.0.1:9") == 1
    said = "no syncer answers at http://127.0.0.1:9: is the run over, or its host cut off? Name its folder"
    assert said in capsys.readouterr().err


def test_the_status_of_a_run_that_is_over_is_its_summary(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    run = folder / "over"
    run.mkdir()
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in small_run()))
    (run / "summary.json").write_text("{}")
    (run / "syncer.url").write_text("http://127.0.0.1:9")
    assert atoll(monkeypatch, "status", "over") == 0
    told = capsys.readouterr().out
    assert "2 learners made 24 steps together" in told and "goodput" in told and "cut off" not in told
    assert atoll(monkeypatch, "status", "over", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 7


@pytest.mark.parametrize(("address", "command"), [(True, "train"), (False, "train"), (True, "syncer")])
def test_the_status_of_a_run_that_was_cut_off_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, address: bool, command: str
) -> None:
    (folder / "old" / "run.toml").write_text(f"by_hand = {str(command == 'syncer').lower()}\n")
    path = folder / "old" / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in small_run()[:-3]))
    os.utime(path, (1.0, 1.0))
    if address:
        (folder / "old" / "syncer.url").write_text("http://127.0.0.1:9")
    assert atoll(monkeypatch, "status", "old") == 0
    assert f"it was cut off. It goes on with:\n  atoll {command} --resume old\n" in capsys.readouterr().out


def test_the_status_of_a_run_that_failed_at_its_end_begins_with_the_reason_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    run = folder / "old"
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in small_run()))
    assert close(RunDir(run), Console(quiet=True), failure="learner-1 failed and did not come back") != ""
    assert atoll(monkeypatch, "status", "old") == 0
    assert capsys.readouterr().out.startswith("This run failed: learner-1 failed and did not come back\n")
    assert state_of(RunDir(run)) == "failed"
    assert close(RunDir(run), Console(quiet=True)) == "" and state_of(RunDir(run)) == "ended"


@pytest.mark.parametrize(
    ("learners", "default", "told"),
    [
        (2, False, ""),
        (2, True, "2 learners, the default: --learners N starts another number."),
        (
            4,
            True,
            "4 learners, the default: --learners N starts another number. They share the 2 cores of this machine.",
        ),
        (8, False, "8 learners share the 2 cores of this machine."),
    ],
)
def test_how_many_learners_start_is_said_where_nobody_chose(
    monkeypatch: pytest.MonkeyPatch, learners: int, default: bool, told: str
) -> None:
    monkeypatch.setattr("atoll.cli.train.cores", lambda: 2)
    assert train.describe_learners(learners, None, default=default) == told


def test_ranks_share_the_cores_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.cli.train.cores", lambda: 2)
    told = "2 learners of 2 ranks share the 2 cores of this machine."
    assert train.describe_learners(2, None, default=False, ranks=2) == told
    assert train.describe_learners(1, None, default=False, ranks=2) == ""


def test_the_status_of_a_run_that_failed_begins_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    died = {"at": 1012.9, "kind": "exited", "process": "a", "code": 1, "text": "a failed: NameError: name 'lerner'"}
    lines = [*small_run()[:-1], died, small_run()[-1]]
    (folder / "old" / "summary.json").unlink(missing_ok=True)
    (folder / "old" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in lines))
    assert atoll(monkeypatch, "status", "old") == 0
    reason, command, *_ = told = capsys.readouterr().out.splitlines()
    assert reason.startswith("This run failed: a failed: NameError: name 'lerner'. Once that is mended, ")
    assert command == "  atoll train --resume old" and told.count(command) == 1


@pytest.mark.parametrize("address", [True, False])
def test_the_status_of_a_run_that_starts_does_not_say_that_it_was_cut_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, address: bool
) -> None:
    path = folder / "old" / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in small_run()[:9]))
    (folder / "old" / "journal").mkdir()
    (folder / "old" / "run.toml").write_text("")
    if address:
        (folder / "old" / "syncer.url").write_text("http://127.0.0.1:9")
    with hold_run(folder / "old"):
        assert atoll(monkeypatch, "status", "old") == 0
        told = capsys.readouterr().out
        assert told.startswith("This run is starting") and "cut off" not in told
        assert atoll(monkeypatch, "status", "old", "--json") == 0
        assert json.loads(capsys.readouterr().out) == {"state": "starting"}
        path.write_text("".join(json.dumps(event) + "\n" for event in small_run()))
        assert atoll(monkeypatch, "status", "old", "--json") == 0
        assert json.loads(capsys.readouterr().out) == {"state": "ending"}
        path.write_text("".join(json.dumps(event) + "\n" for event in small_run()[:9]))
    assert atoll(monkeypatch, "status", "old") == 0
    assert "cut off" in capsys.readouterr().out


def test_the_status_of_a_run_that_another_machine_serves_names_that_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    run = folder / "old"
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in small_run()[:9]))
    (run / "run.toml").write_text("")
    (run / "syncer.url").write_text("http://127.0.0.1:9")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("socket.gethostname", lambda: "syncer.example.org")
        lease = acquire(run / "journal")
    assert atoll(monkeypatch, "status", "old") == 0
    said = capsys.readouterr().out
    assert said.startswith(
        f"This run is served on syncer.example.org (pid {os.getpid()}, term 1), not on this machine. "
    )
    assert "and syncer.example.org is cut off: end that process there (kill -9), and a standby takes over" in said
    assert atoll(monkeypatch, "status", "old", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"state": "elsewhere", "host": "syncer.example.org"}
    lease.release()


def test_an_https_address_is_opened_by_the_link_or_the_run_that_belongs_to_it(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    url, link = "https://127.0.0.1:7077", f"atoll://{'f00d' * 16}@127.0.0.1:7077/r1/{'ab' * 32}"
    monkeypatch.delenv("ATOLL_JOIN", raising=False)
    with pytest.raises(ConfigError, match="asks for a token and a certificate: name the run's folder"):
        where(url)
    monkeypatch.setenv("ATOLL_JOIN", link)
    assert where(f"{url}/") == link
    with pytest.raises(ConfigError, match="asks for a token"):
        where("https://127.0.0.1:7078")
    monkeypatch.delenv("ATOLL_JOIN")
    run = folder / "atoll-runs" / "here"
    run.mkdir(parents=True)
    (run / "run.toml").write_text("[service]\nkeys = 'atoll-keys'\n")
    (run / "syncer.url").write_text(url)
    with pytest.raises(ConfigError, match="atoll-keys"):  # it looks for the operator's token there
        where(url)


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert atoll(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"atoll {__version__}\n"


class Taken(Exception):
    """Instead of a run."""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[LocalRun]:
    runs: list[LocalRun] = []

    async def run(self: LocalRun) -> None:
        runs.append(self)
        raise Taken

    monkeypatch.setattr(LocalRun, "run", run)
    return runs


def begin(monkeypatch: pytest.MonkeyPatch, taken: list[LocalRun], *arguments: str) -> LocalRun:
    with pytest.raises(Taken):
        atoll(monkeypatch, "train", *arguments)
    return taken[-1]


def test_the_command_line_becomes_settings(
    monkeypatch: pytest.MonkeyPatch, taken: list[LocalRun], folder: Path
) -> None:
    (folder / "run.toml").write_text("seed = 3\n[protocol]\nlearners = 8\nquorum = 2\n")
    run = begin(
        monkeypatch,
        taken,
        "--config",
        "run.toml",
        "--learners",
        "3",
        "--set",
        "synchronous=true",
        "--set",
        "outer_lr=0.5",
        "--set",
        "workload.depth=1",
    )
    assert (run.config.seed, run.config.protocol.learners, run.config.protocol.quorum) == (3, 3, 2)
    assert run.config.protocol.synchronous and run.config.protocol.overlap == 0
    assert (run.config.outer.lr, run.config.workload) == (0.5, {"depth": 1})
    assert run.config.protocol.steps == train.STEPS, "the built-in workload would go on for ever"


def test_train_says_at_its_start_that_it_compiles_and_what_the_loss_of_its_disk_would_cost(
    monkeypatch: pytest.MonkeyPatch, taken: list[LocalRun], capsys: pytest.CaptureFixture[str]
) -> None:
    """As `atoll syncer` does. Without a bucket it said nothing."""
    monkeypatch.setattr(kernels, "are_compiled", lambda: False)
    monkeypatch.setattr(kernels, "warm", lambda: None)
    begin(monkeypatch, taken, "--learners", "1", "--steps", "10", "--out", "new")
    said = " ".join(capsys.readouterr().out.split())
    assert "compiling the kernels (only the first time; about half a minute)" in said
    assert "no --store: should this disk be lost, the run is lost with it" in said


def test_learners_have_as_many_ranks_as_are_asked_for_also_when_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, taken: list[LocalRun], stopped: WrittenRun
) -> None:
    assert begin(monkeypatch, taken, "--out", "plain").config.ranks == 1
    run = begin(monkeypatch, taken, "script.py", "--ranks", "2", "--out", "several")
    assert run.config.ranks == 2 and b"ranks = 2\n" in run.config.toml()
    stopped.dir.settings.write_text("ranks = 2\n")
    assert begin(monkeypatch, taken, "--resume", "run").config.ranks == 2
    run = begin(monkeypatch, taken, "--resume", "run", "--ranks", "4")
    assert run.config.ranks == 4 and run.resume is not None and not run.resume.changes, "no rule of the run"


def test_a_users_script_keeps_its_own_arguments_and_has_no_budget(
    monkeypatch: pytest.MonkeyPatch, taken: list[LocalRun]
) -> None:
    run = begin(monkeypatch, taken, "script.py", "--learners", "2", "--set", "evaluate_every=0", "--", "--mine", "3")
    assert run.script == ["script.py", "--mine", "3"]
    assert not run.evaluator and run.config.protocol.steps == 0


def test_a_new_run_waits_for_its_learners_for_as_long_as_is_said(
    monkeypatch: pytest.MonkeyPatch, taken: list[LocalRun], folder: Path
) -> None:
    (folder / "wait.toml").write_text("[protocol]\nwait_for_learners_s = 5.0\n")
    asked: list[tuple[str, ...]] = [
        (),
        ("--config", "wait.toml"),
        ("--config", "wait.toml", "--set", "wait_for_learners_s=0"),
    ]
    found = [begin(monkeypatch, taken, *words).config.protocol.wait_for_learners_s for words in asked]
    assert found == [30.0, 5.0, 0.0]


def test_only_a_breakable_run_looks_for_plans_of_faults(monkeypatch: pytest.MonkeyPatch, taken: list[LocalRun]) -> None:
    run = begin(monkeypatch, taken, "--out", "plain")
    assert run.beside is None and run.route is None and not run.syncer_words
    run = begin(monkeypatch, taken, "--out", "breakable", "--breakable")
    assert run.beside is not None and run.route is not None and "--disk" in run.syncer_words


def test_the_demo_kills_one_and_may_be_repeated(
    monkeypatch: pytest.MonkeyPatch, taken: list[LocalRun], folder: Path
) -> None:
    run = begin(monkeypatch, taken, "--demo", "--out", "old")
    assert run.kills == (train.DEMO_KILL,)
    run = begin(monkeypatch, taken, "--demo", "--out", "old", "--kill", "learner-1@.25")
    assert run.kills == (Kill("learner-1", 0.25),)
    assert not (folder / "old" / "events.jsonl").exists()


# ---- runs that lie there already -------------------------------------------------------------------------------------


@pytest.fixture
def stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> WrittenRun:
    """In the folder `run`: cuts 0, 2 and 4, and a round behind."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return cut_run(folder / "run")


def test_a_run_goes_on_in_its_own_folder_with_its_own_settings(
    monkeypatch: pytest.MonkeyPatch, taken: list[LocalRun], stopped: WrittenRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(monkeypatch, taken, "--resume", "run", "--steps", "900", "--set", "outer_lr=0.5", "--set", "port=7078")
    assert run.out == stopped.dir and run.resume is not None
    assert (run.resume.run, run.resume.cut, run.resume.reopen) == ("small", 4, False)
    assert run.resume.changes == ("steps=900", "outer_lr=0.5"), "a port is no rule of the run"
    assert run.config.seed == 7 and run.config.protocol.steps == 900
    assert (run.config.outer.lr, run.config.service.port) == (0.5, 7078)
    assert run.script == ["-m", "atoll.workloads.builtin"]
    assert "run small goes on at round 5: the newest model, optimizers as of snapshot 4" in capsys.readouterr().out


def test_a_run_goes_on_with_the_script_it_was_begun_with(
    monkeypatch: pytest.MonkeyPatch, taken: list[LocalRun], stopped: WrittenRun
) -> None:
    stopped.dir.settings.write_text('script = ["script.py", "--mine", "3"]\n')
    assert begin(monkeypatch, taken, "--resume", "run", "--trust").script == ["script.py", "--mine", "3"]


def test_a_run_whose_learners_were_started_by_hand_is_told_its_script(
    monkeypatch: pytest.MonkeyPatch,
    taken: list[LocalRun],
    stopped: WrittenRun,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stopped.dir.settings.write_text("by_hand = true\n")
    before = everything(stopped.dir.path)
    assert atoll(monkeypatch, "train", "--resume", "run") == 2
    err = capsys.readouterr().err
    assert "were started by hand, so their script is not known: atoll train SCRIPT --resume run, or atoll syncer" in err
    assert err.count("\n") == 1 and everything(stopped.dir.path) == before
    run = begin(monkeypatch, taken, "script.py", "--resume", "run", "--", "--mine", "3")
    assert run.config.script == (str(folder / "script.py"), "--mine", "3") and not run.config.by_hand
    assert run.script == [str(folder / "script.py"), "--mine", "3"]


def test_what_a_run_was_begun_with_is_what_it_can_go_on_with(
    monkeypatch: pytest.MonkeyPatch, taken: list[LocalRun], folder: Path
) -> None:
    run = begin(monkeypatch, taken, "script.py", "--", "--mine", "3")
    assert run.config.script == (str(folder / "script.py"), "--mine", "3"), "from wherever that is asked"


def test_a_new_run_is_made_of_a_cut_in_a_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch, taken: list[LocalRun], stopped: WrittenRun, folder: Path
) -> None:
    run = begin(monkeypatch, taken, "--resume", "run", "--from-cut", "2", "--out", "new", "--steps", "900")
    assert run.out.path == folder / "new" and run.resume is not None
    assert run.resume.cut == 2 and run.resume.exact and run.resume.run != "small"
    assert run.resume.changes == ("steps=900",)
    assert complete_cuts(run.out.cuts) == [2] and complete_cuts(stopped.dir.cuts) == [4, 2, 0]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train --resume run --from-cut 3 --out new", "run has no complete cut 3: there are 0, 2, 4"),
        ("train --resume run --steps 10", "has already trained for 10 steps: ask for more with --steps or --tokens"),
        ("train --resume run --set quorum=7", "quorum = 7 can never be reached by"),
        ("train --resume run --from-cut 2 --out new --set fragments=4", "'fragments' cannot differ in a new run from"),
        ("train --resume run --from-cut 2 --out new --set workload.dept=4", "unknown key 'dept': did you mean depth"),
        ("train --resume run --from-cut 2 --out new --set qorum=4", "there is no setting 'qorum': did you mean quorum"),
        ("train --resume run --from-cut 2 --out old", "old already holds a run: choose another folder with --out"),
        ("export run out.safetensors --cut 3", "run has no cut 3; there are: 0, 2, 4"),
        ("export run script.py", "script.py is there already: choose another name, or replace it with --force"),
        ("export run run/model.safetensors", "lies in the run's own directory: choose a place outside of run"),
    ],
)
def test_what_cannot_be_done_with_a_run_is_one_line_and_leaves_it_alone(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stopped: WrittenRun,
    command: str,
    said: str,
) -> None:
    before = everything(stopped.dir.path)
    assert atoll(monkeypatch, *command.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("atoll: ") and err.count("\n") == 1
    assert said in err
    assert everything(stopped.dir.path) == before


def test_a_run_that_is_well_is_verified(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stopped: WrittenRun
) -> None:
    assert atoll(monkeypatch, "verify", "run") == 0
    out, err = capsys.readouterr()
    assert "all is well" in out and "5, 0 of them passed over" in out and err == ""
    assert atoll(monkeypatch, "verify", "run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True and found["rounds"] == 5


def test_a_run_that_is_not_well_fails_with_the_first_thing_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stopped: WrittenRun
) -> None:
    flip(stopped.dir.cuts / "000002" / "theta-001.bin", 5)
    assert atoll(monkeypatch, "verify", "run") == 1
    out, err = capsys.readouterr()
    assert "all is well" not in out
    assert err.startswith("atoll: ") and err.count("\n") == 1 and "theta-001.bin is damaged" in err
    assert atoll(monkeypatch, "verify", "run", "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["ok"] is False and "theta-001.bin is damaged" in err


def test_a_tape_with_a_changed_byte_is_not_replayed_and_its_record_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stopped: WrittenRun
) -> None:
    segment = stopped.dir.journal / "segment-000001.log"
    flip(segment, segment.stat().st_size // 2)
    assert atoll(monkeypatch, "replay", "run") == 4
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert re.search(r"segment-000001.log is damaged at byte \d+, record \d+", err), err


def test_weights_are_exported_with_the_moment_they_are_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stopped: WrittenRun, folder: Path
) -> None:
    assert atoll(monkeypatch, "export", "run", "model.safetensors") == 0
    assert (
        capsys.readouterr().out == "run small after 5 rounds (cut 4 and 1 rounds behind it) is in model.safetensors\n"
    )
    assert (folder / "model.safetensors").stat().st_size > 0
    assert atoll(monkeypatch, "export", "run", "model.safetensors", "--cut", 2, "--force") == 0
    assert capsys.readouterr().out == "run small after 2 rounds (cut 2) is in model.safetensors\n"
    assert atoll(monkeypatch, "export", "run", "model.safetensors", "--tail", 2, "--force") == 0
    assert capsys.readouterr().out.endswith("the mean of its last 2 cycles is in model-tail.safetensors\n")
    assert atoll(monkeypatch, "export", "run", "model.safetensors", "--tail", 2, "--best") == 2
    assert "--best and --tail name different models: give one of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "said"), [("quorum=2", "changed: quorum=2"), ("", "everything was like that already")]
)
def test_settings_go_to_the_syncer_of_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, answer: str, said: str
) -> None:
    asked: list[tuple[str, list[str]]] = []

    async def post(url: str, words: list[str]) -> str:
        asked.append((url, words))
        return answer

    monkeypatch.setattr(look, "post_settings", post)
    (folder / "old" / "syncer.url").write_text("http://127.0.0.1:7077")
    assert atoll(monkeypatch, "set", "old", "quorum=2", "outer_lr=0.5") == 0
    assert asked == [("http://127.0.0.1:7077", ["quorum=2", "outer_lr=0.5"])]
    assert capsys.readouterr().out == said + "\n"


def test_a_mistake_in_settings_has_the_exit_code_that_it_has_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    async def post(url: str, words: list[str]) -> str:
        raise PeerError("there is no setting 'outer_lrr'")

    monkeypatch.setattr(look, "post_settings", post)
    (folder / "old" / "syncer.url").write_text("http://127.0.0.1:7077")
    assert atoll(monkeypatch, "set", "old", "outer_lrr=0.5") == 2
    assert capsys.readouterr().err == "atoll: there is no setting 'outer_lrr'\n"


def test_the_runs_of_a_comparison_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("decoupled", "data-parallel"):
        place = tmp_path / "atoll-runs" / "both" / name
        place.mkdir(parents=True)
        (place / "run.toml").write_text("")
    assert atoll(monkeypatch, "ls", "--json") == 0
    listed = [row["run"] for row in json.loads(capsys.readouterr().out)]
    assert listed[-2:] == ["atoll-runs/both/decoupled", "atoll-runs/both/data-parallel"]


def test_settings_that_no_syncer_hears_are_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "old" / "syncer.url").write_text("http://127.0.0.1:9")
    assert atoll(monkeypatch, "set", "old", "quorum=2") == 1
    err = capsys.readouterr().err
    assert err.startswith("atoll: ") and err.count("\n") == 1 and "http://127.0.0.1:9" in err


# ---- parts by hand ---------------------------------------------------------------------------------------------------


def test_a_learner_by_hand_is_named_where_it_says_so_and_takes_a_free_name_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: dict[str, Any] = {}
    monkeypatch.setattr(os, "execv", lambda path, command: started.update(command=command, env=dict(os.environ)))
    for key in ("ATOLL_SYNCER", "ATOLL_LEARNER", "ATOLL_ROLE"):
        monkeypatch.setenv(key, "")
        monkeypatch.delenv(key)
    atoll(monkeypatch, "learn", "script.py", "--syncer", "http://127.0.0.1:7077/", "--", "--mine", "3")
    assert started["command"][1:] == ["-m", "atoll.launch.script", "script.py", "--mine", "3"]
    assert "ATOLL_LEARNER" not in started["env"], "the script finds one that is free (learner/folder.py)"
    assert started["env"]["ATOLL_SYNCER"] == "http://127.0.0.1:7077"
    atoll(monkeypatch, "learn", "script.py", "--syncer", "http://127.0.0.1:7077", "--name", "anna")
    assert started["env"]["ATOLL_LEARNER"] == "anna"


def test_what_is_wrong_with_the_command_of_all_ranks_is_said_by_the_first_of_a_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert atoll(monkeypatch, "learn", "missing.py", "--syncer", "http://127.0.0.1:1") == 2
        assert capsys.readouterr().err.count("\n") == lines


def test_the_command_starts_without_torch() -> None:
    code = "import sys, atoll.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    """`atoll --help | head`: nobody reads the pipe any more when it prints."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "atoll", "--help"], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
