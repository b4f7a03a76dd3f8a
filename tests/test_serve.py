"""`atoll syncer`: where it listens, and what its terminal says."""

from __future__ import annotations

import io
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.observe.conftest import a_status

from atoll.bucket.client import StoreUnavailable
from atoll.cli import serve
from atoll.cli.advertised import find_own_hosts, find_place, own_host
from atoll.cli.linked_pins import LinkedPins
from atoll.cli.shared import without_own_shards
from atoll.config import Config, Service, load
from atoll.launch import restoring
from atoll.numerics import kernels
from atoll.observe.tail import Comings, status_line
from atoll.store.atomic import Appender
from atoll.store.rundir import RunDir
from atoll.telemetry.events import EventLog

from .test_cli import atoll


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """With which settings a syncer was started."""
    found: list[Config] = []
    monkeypatch.setattr(serve, "serve", lambda settings, *words, **more: found.append(settings) or 0)
    monkeypatch.setattr(serve, "close", lambda *words, **more: None)
    return found


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def make_run(folder: Path, **service: Any) -> RunDir:
    """One that was begun by hand, and interrupted before its first learner came."""
    run = RunDir.create(folder / "hand")
    run.settings.write_bytes(Config(by_hand=True, service=Service(**service)).toml())
    run.journal.mkdir()
    return run


def test_a_resumed_run_listens_where_it_did(
    tmp_path: Path, port: int, served: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came up on 7077, and every link and address in use was dead."""
    run = make_run(tmp_path, port=port)
    assert atoll(monkeypatch, "syncer", "--resume", str(run.path)) == 0
    assert (served[-1].service.host, served[-1].service.port) == ("127.0.0.1", port)


def test_a_run_on_any_port_is_resumed_on_the_one_it_had(
    tmp_path: Path, port: int, served: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, port=0)
    run.address.write_text(f"http://127.0.0.1:{port}")
    assert atoll(monkeypatch, "syncer", "--resume", str(run.path)) == 0
    assert served[-1].service.port == port and load(run.settings).service.port == 0
    run.withdraw_address()  # by a supervisor whose syncer then did not start
    assert atoll(monkeypatch, "syncer", "--resume", str(run.path)) == 0
    assert served[-1].service.port == port


def test_another_address_that_is_given_is_the_runs_own_from_then_on(
    tmp_path: Path, port: int, served: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, port=7177)
    assert atoll(monkeypatch, "syncer", "--resume", str(run.path), "--port", str(port), "--bind", "::1") == 0
    assert atoll(monkeypatch, "syncer", "--resume", str(run.path)) == 0
    assert [(one.service.host, one.service.port) for one in served] == [("::1", port)] * 2


def test_a_run_with_a_bucket_goes_on_under_another_home_by_trust_and_a_standby_asks_nothing(
    tmp_path: Path,
    port: int,
    served: list[Config],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A pod that moved ended with exit code 2, again and again: the record of runs that began here went with the last
    pod. Whoever restored the run is known, and a standby runs nothing."""
    pytest.importorskip("obstore")
    run = make_run(tmp_path, port=port, store=f"file://{tmp_path}/bucket")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    assert atoll(monkeypatch, "syncer", "--resume", str(run.path)) == 2
    said = capsys.readouterr().err
    assert f"copies it to file://{tmp_path}/bucket" in said and "say --trust" in said and not served
    assert atoll(monkeypatch, "syncer", "--standby", str(run.path)) == 0
    assert len(served) == 1, "it would wait for its turn"
    assert atoll(monkeypatch, "syncer", "--resume", str(run.path), "--trust") == 0
    assert atoll(monkeypatch, "syncer", "--resume", str(run.path)) == 0, "it is known from then on"
    assert len(served) == 3


def test_a_run_whose_bucket_is_lost_is_refused_and_goes_on_without_it(
    tmp_path: Path,
    port: int,
    served: list[Config],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The runbook's words for it were refused, since a bucket is tried before anything starts."""
    pytest.importorskip("obstore")

    def fail(*words: object) -> None:
        raise StoreUnavailable("cannot put s3://bucket/run/store.json: no route")

    monkeypatch.setattr(restoring, "begin_store", fail)
    run = make_run(tmp_path, port=port, store="s3://bucket/run", durability="store")
    resume = ("syncer", "--resume", str(run.path), "--trust")
    assert atoll(monkeypatch, *resume) == 2
    assert "to go on without it: --store none --set durability=round" in capsys.readouterr().err
    assert atoll(monkeypatch, *resume, "--store", "none", "--set", "durability=round") == 0
    assert served[-1].service.store == load(run.settings).service.store == ""


@pytest.mark.parametrize("file", ["kubernetes/syncer.yaml", "slurm/syncer.sbatch", "systemd/atoll-syncer.service"])
def test_a_deployment_whose_home_may_be_another_next_time_trusts_its_own_folder(file: str) -> None:
    text = (Path(__file__).parents[1] / "examples" / "deploy" / file).read_text()
    [line] = [line for line in text.splitlines() if "--resume" in line and not line.lstrip().startswith("#")]
    assert "--trust" in line


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_a_port_that_is_taken_is_told_before_anything_is_touched(
    tmp_path: Path,
    taken: int,
    served: list[Config],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make_run(tmp_path, port=taken)
    run.summary.write_text("of an earlier end")
    for words in (["--resume", str(run.path)], ["--out", str(tmp_path / "new"), "--port", str(taken)]):
        assert atoll(monkeypatch, "syncer", *words) == 2
        said = capsys.readouterr().err
        assert said == f"atoll: port {taken} is in use on 127.0.0.1: choose another (--set port=7077), or 0 for any\n"
    assert served == [] and run.summary.exists() and not (tmp_path / "new").exists()


@pytest.mark.parametrize("takes_over", [False, True])
def test_the_terminal_says_who_comes_and_goes(tmp_path: Path, takes_over: bool) -> None:
    """That a run goes on was printed when it was resumed; a standby tells nothing of the time in which it waited."""
    path, paper = tmp_path / "events.jsonl", io.StringIO()
    with Appender(path) as sink:
        events = EventLog(sink)
        events.say("joined", "old joined (incarnation 1)", {"learner": "old", "incarnation": 1})
        comings = Comings(path, Console(file=paper, width=20), every_s=0.01, takes_over=takes_over)
        if takes_over:
            events.say("lost", "anna is away: before the takeover", {"learner": "anna", "incarnation": 1})
        events.say("reigned", "run r1 goes on in term 2 at round 40: cut 3", {"round": 40, "term": 2})
        events.say("joined", "anna joined (incarnation 1)", {"learner": "anna", "incarnation": 1})
        events.say("round", "round 41", {"round": 41})
        events.say("lost", "anna is away: \x1b[31mher connection broke", {"learner": "anna", "incarnation": 1})
        events.say("joined", "anna came back (incarnation 1)", {"learner": "anna", "incarnation": 1})
        events.say("relay", "relay eu is gone: it was killed", {"relay": "eu", "gone": True})
        events.say("alarm", "the store fails: no route", {"about": "store", "over": False})
        events.say("alarm", "the store answers again", {"about": "store", "over": True})
        events.say("quarantined", "anna is in quarantine", {"learner": "anna", "reason": "7 values are not finite"})
        events.say("quarantined", "anna is in quarantine", {"learner": "anna", "reason": "8 values are not finite"})
        events.say("left", "anna has left: the run is over", {"learner": "anna", "reason": "the run is over"})
        events.say("score", "validation loss 1.5 at round 41", {"round": 41, "loss": 1.5})
        comings.note_status(status := a_status())
        comings.start()
        comings.stop()
    assert paper.getvalue().splitlines() == [
        *(["takes over in term 2: the run goes on at round 40"] if takes_over else []),
        "anna joined (incarnation 1)",
        "anna is away: ·[31mher connection broke",
        "anna came back (incarnation 1)",
        "relay eu is gone: it was killed",
        "ALARM: the store fails: no route",
        "the store answers again",
        "anna is in quarantine: 7 values are not finite",
        "validation loss 1.5 at round 41",
        status_line(status),
    ]


# ---- where it is found ----------------------------------------------------------------------------------------------

ANYWHERE, BOTH = Service(host="0.0.0.0"), ("192.0.2.1:7077", "127.0.0.2:7078")
HERE = own_host("0.0.0.0")


@pytest.mark.parametrize(
    ("service", "port", "hosts", "shown", "remark"),
    [
        (ANYWHERE, 7078, BOTH, "127.0.0.2:7078", ""),
        (
            ANYWHERE,
            7077,
            BOTH,
            f"{HERE}:7077",
            "it listens on port 7077 of this host; the links name 192.0.2.1:7077 and 127.0.0.2:7078: "
            "no learner finds it there; add --port 7078",
        ),
        (
            ANYWHERE,
            7080,
            ("192.0.2.1:7077",),
            f"{HERE}:7080",
            "it listens on port 7080 of this host; the links name 192.0.2.1:7077: "
            "no learner finds it there; add --advertise HOST:PORT, and hand out new links",
        ),
        (
            ANYWHERE,
            7077,
            ("192.0.2.1:7077",),
            f"{HERE}:7077",
            "it listens on port 7077 of this host; the links name 192.0.2.1:7077: "
            "learners find it where one of these leads here",
        ),
        (
            Service(front="syncer.crt"),
            7077,
            ("192.0.2.1:443",),
            "192.0.2.1:443",
            "it listens on port 7077 of this host; the links name 192.0.2.1:443: "
            "learners find it where one of these leads here",
        ),
    ],
)
def test_a_syncer_that_goes_on_says_which_address_of_the_links_it_is(
    service: Service, port: int, hosts: tuple[str, ...], shown: str, remark: str
) -> None:
    place = find_place(service, port, hosts, find_own_hosts(hosts), goes_on=True)
    assert place == (shown, remark, "no learner" in remark)


def test_a_new_run_shows_the_address_that_its_operator_names() -> None:
    place = find_place(ANYWHERE, 7078, ("192.0.2.1:443",), frozenset(), goes_on=False)
    assert place.shown == "192.0.2.1:443" and "port 7078 of this host" in place.remark and not place.warns


def test_a_run_that_goes_on_without_its_keys_is_told_to_bring_them(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, port=port, keys=str(tmp_path / "gone"))
    for how in ("--resume", "--standby"):
        assert atoll(monkeypatch, "syncer", how, str(run.path)) == 2
        said = capsys.readouterr().err
        assert "copy the keys of the run there, or name them with --keys DIR" in said and "atoll cert" not in said


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    for name in ("keys", "other"):
        assert atoll(monkeypatch, "cert", "--out", str(tmp_path / name)) == 0
    capsys.readouterr()
    return tmp_path / "keys"


def test_a_standby_whose_certificate_no_link_names_is_refused_when_it_starts(
    tmp_path: Path,
    port: int,
    keys: Path,
    served: list[Config],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make_run(tmp_path, port=port, keys=str(keys))
    LinkedPins(run, Service(keys=str(keys))).note()
    assert atoll(monkeypatch, "syncer", "--standby", str(run.path), "--keys", str(tmp_path / "other")) == 2
    out, said = capsys.readouterr()
    assert not served and not out and len(said.splitlines()) == 1
    assert "is none that the links of this run name: every learner would be locked out" in said
    assert "Copy the keys of the run to this machine, and name them with --keys DIR" in said
    shutil.copytree(keys, tmp_path / "copy")
    assert atoll(monkeypatch, "syncer", "--standby", str(run.path), "--keys", str(tmp_path / "copy")) == 0
    assert len(served) == 1


def test_a_certificate_that_was_renewed_while_the_run_went_on_is_one_of_the_links(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, service = make_run(tmp_path), Service(keys=str(keys))
    pins = LinkedPins(run, service)
    pins.note()
    for option in ("--next", "--renew"):
        assert atoll(monkeypatch, "cert", "--out", str(keys), option) == 0
        pins.note()
    assert LinkedPins(run, service).describe_foreign() == ""
    assert LinkedPins(run, Service(keys=str(tmp_path / "other"))).describe_foreign()
    assert LinkedPins(make_run(tmp_path / "new"), Service(keys=str(keys))).describe_foreign() == "", "nothing was noted"


def test_a_syncer_that_goes_on_with_keys_that_no_link_names_says_so(
    tmp_path: Path, port: int, keys: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = make_run(tmp_path, port=port, keys=str(keys)), str(tmp_path / "other")
    LinkedPins(run, Service(keys=str(keys))).note()

    def start(settings: Config, *words: Any, ready: Callable[[str, str, str], None], **more: Any) -> int:
        ready(f"https://127.0.0.1:{port}", "r1", f"https://127.0.0.1:{port}/")
        return 0

    monkeypatch.setattr(serve, "serve", start)
    monkeypatch.setattr(serve, "close", lambda *words, **more: None)
    assert atoll(monkeypatch, "syncer", "--resume", str(run.path), "--keys", other) == 0
    said = capsys.readouterr().out
    assert "is none that the links of this run name: no learner that has one can join" in said
    assert "go on with a copy of the run's keys (--keys DIR), or hand out new links" in said
    assert atoll(monkeypatch, "syncer", "--resume", str(run.path)) == 0
    assert "none that the links" not in capsys.readouterr().out, "the new links name it"


# ---- shards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--shard 3/2", "--shard 3/2 is not understood: write it as 2/3"),
        ("--shard 2/2 --out two", "--shard 2/2 needs --join LINK"),
        ("--shard 2/2 --join http://127.0.0.1:7077", "--shard 2/2 needs --out DIR"),
        ("--shard 2/2 --join http://127.0.0.1:7077 --out two --learners 3", "shard 2 is told the run's settings"),
    ],
)
def test_a_shard_that_is_started_wrongly_is_told_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    assert atoll(monkeypatch, "syncer", *words.split()) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"atoll: {said}") and told.count("\n") == 1


def test_the_first_of_several_says_how_the_others_are_started() -> None:
    [line] = serve.invite_shards(Service(shards=3), "http://127.0.0.1:7077")
    assert "before shard 2 … 3 is there: atoll syncer --shard 2/3 --out DIR --join http://127.0.0.1:7077" in line
    assert serve.invite_shards(Service(), "http://127.0.0.1:7077") == []


def test_a_run_that_goes_on_may_name_the_shards_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[service]\nshards = 2\n")
    assert without_own_shards(["steps=5", "shards=2"], tmp_path) == ["steps=5"]
    assert without_own_shards(["shards=3"], tmp_path) == ["shards=3"]


def test_a_standby_says_in_its_log_that_it_compiles_before_it_stands_by(
    tmp_path: Path, served: list[Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, compiled = make_run(tmp_path), []
    monkeypatch.setattr(kernels, "are_compiled", lambda: False)
    monkeypatch.setattr(kernels, "warm", lambda: compiled.append("warm"))
    assert atoll(monkeypatch, "syncer", "--standby", str(run.path), "--port", "0") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "compiling the kernels (only the first time; about half a minute); then it stands by" in said
    assert compiled == ["warm"] and len(served) == 1


def test_a_shard_shows_the_address_that_it_advertises_and_says_that_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert atoll(monkeypatch, "cert") == 0
    monkeypatch.setattr(kernels, "are_compiled", lambda: False)
    monkeypatch.setattr(kernels, "warm", lambda: None)
    monkeypatch.setattr(serve, "serve_shard", lambda *words, ready, **more: ready("https://127.0.0.1:7078") or 0)
    words = ("--join", "http://127.0.0.1:7077", "--out", "two", "--keys", "atoll-keys", "--advertise", "a.example.org")
    assert atoll(monkeypatch, "syncer", "--shard", "2/2", *words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "compiling the kernels" in said and "shard 2 of 2 at https://a.example.org:7078, in two" in said
