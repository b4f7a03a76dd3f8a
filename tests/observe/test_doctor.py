from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll import cli
from atoll.observe import doctor
from atoll.observe.doctor import local
from atoll.observe.doctor.local import Check, Clocks, size

GIB = 1 << 30
TORCH: dict[str, Any] = {"version": "2.13.0+cpu", "import_s": 1.8, "cuda": None, "gpus": [], "mps": False, "threads": 2}
GPU = {"name": "NVIDIA H200", "memory_bytes": 140 * GIB}
WARM: dict[str, Any] = {"warm_s": 0.7, "cache": "/somewhere", "writable": True, "compiled": 0}


# ---- judgements ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "verdict", "words"),
    [
        (local.check_python((3, 11, 0)), "ok", "3.11.0"),
        (local.check_python((3, 10, 9)), "fail", "3.10.9"),
        (local.judge_torch(TORCH), "ok", "2.13.0+cpu, CPU only, imported in 1.8 s"),
        (local.judge_torch(TORCH | {"gpus": [GPU, GPU], "cuda": "13.0"}), "ok", "2 × NVIDIA H200"),
        (local.judge_torch(TORCH | {"cuda": "13.0"}), "warn", "CPU only"),
        (local.judge_torch(TORCH | {"version": "2.5.1"}), "fail", "2.5.1"),
        (local.judge_torch(TORCH | {"version": "10.0.0"}), "ok", "10.0.0"),
        (local.judge_torch(None, "No module named 'torch'"), "fail", "No module named 'torch'"),
        (local.judge_kernels(WARM), "ok", "loaded from their cache in 0.70 s"),
        (local.judge_kernels(WARM | {"compiled": 1}), "ok", "compiled in 0.70 s"),
        (local.judge_kernels(WARM | {"writable": False}), "warn", "loaded"),
        (local.judge_kernels(None, "no locator available"), "fail", "no locator available"),
        (local.judge_processors(2, 1.5), "ok", "2 cores, load 1.5"),
        (local.judge_processors(1, 1.5), "warn", "1 core, load 1.5"),
        (local.judge_memory(24 * GIB, 20 * GIB), "ok", "20 GiB of 24 GiB free"),
        (local.judge_memory(24 * GIB, 2 * GIB), "warn", "2.0 GiB of 24 GiB free"),
        (local.judge_memory(24 * GIB, GIB // 2), "fail", "512 MiB of 24 GiB free"),
        (local.judge_memory(None, None), "ok", "does not say"),
        (local.judge_shared(GIB, GIB), "ok", "1.0 GiB of 1.0 GiB free"),
        (local.judge_shared(GIB // 16, GIB // 16), "warn", "64 MiB"),
        (local.judge_open_files(1024, 4096), "ok", "1,024"),
        (local.judge_open_files(256, 4096), "warn", "256"),
        (local.judge_open_files(64, 4096), "fail", "64"),
        (local.check_clock(Clocks(100.0, 5.0), Clocks(103.001, 8.0)), "ok", "differ by 1.0 ms after 3.0 s"),
        (local.check_clock(Clocks(100.0, 5.0), Clocks(102.0, 8.0)), "warn", "differ by 1000.0 ms"),
        (local.judge_room(Path("runs"), 70 * GIB), "ok", "70 GiB free in runs"),
        (local.judge_room(Path("runs"), GIB), "warn", "1.0 GiB free in runs"),
        (local.judge_room(Path("runs"), GIB // 8), "fail", "128 MiB free in runs"),
        (local.judge_writing(64 << 20, 0.1), "ok", "671 MB/s (64 MiB in 0.10 s)"),
        (local.judge_writing(64 << 20, 10.0), "warn", "7 MB/s"),
        (local.judge_syncing([0.001, 0.002, 0.4]), "ok", "2.0 ms until 4 KiB are safe, 400 ms at worst"),
        (local.judge_syncing([0.06, 0.2, 0.3]), "warn", "200.0 ms"),
    ],
)
def test_a_figure_is_judged(check: Check, verdict: str, words: str) -> None:
    assert (check.verdict, words in check.value) == (verdict, True), check
    assert bool(check.next) == (verdict != "ok"), "what is not well comes with a next step, and nothing else does"


def test_sizes_are_as_people_read_them() -> None:
    assert [size(value) for value in (20 << 10, 512 << 20, 3 * GIB // 2, 73 * GIB)] == [
        "20 KiB",
        "512 MiB",
        "1.5 GiB",
        "73 GiB",
    ]


# ---- probes ----------------------------------------------------------------------------------------------------------


def test_what_a_small_program_says_or_complains_of_is_heard() -> None:
    assert local.run_probe("print('noise'); print('{\"a\": 1}')") == ({"a": 1}, "")
    found, words = local.run_probe("raise RuntimeError('no locator available')")
    assert found is None and words == "RuntimeError: no locator available"


def test_the_disk_is_measured_and_nothing_stays_behind(tmp_path: Path) -> None:
    names = [check.name for check in local.check_disk(tmp_path / "not" / "there")]
    assert names == ["disk room", "disk writing", "disk syncing"]
    assert list(tmp_path.iterdir()) == []


def test_so_much_is_written_and_so_often_synced(tmp_path: Path) -> None:
    done, took_s = local.time_writing(tmp_path / "block", 3 << 20)
    assert done == 3 << 20 == (tmp_path / "block").stat().st_size and took_s > 0
    assert len(local.time_syncs(tmp_path / "block", 5)) == 5


def test_a_disk_that_refuses_is_a_failed_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path, length: int = 0) -> tuple[int, float]:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(local, "time_writing", refuse)
    *_, last = local.check_disk(tmp_path)
    assert (last.verdict, last.name) == ("fail", "disk") and "Read-only file system" in last.value
    assert list(tmp_path.iterdir()) == []


def test_loopback_can_be_used_here() -> None:
    assert local.check_ports().verdict == "ok"


def test_the_card_of_the_default_route_and_its_speed(tmp_path: Path) -> None:
    routes, card = tmp_path / "route", tmp_path / "ib0"
    routes.write_text("Iface\tDestination\tGateway\neth9\t0000A8C0\t0\nib0\t00000000\t0102A8C0\n")
    card.mkdir()
    (card / "speed").write_text("200000\n")
    assert local.check_card(None, tmp_path, routes).value == "ib0, 200,000 Mbit/s"
    (card / "speed").write_text("10\n")
    assert local.check_card(None, tmp_path, routes).verdict == "warn"
    (card / "speed").write_text("-1\n")
    assert "does not tell its speed" in local.check_card(None, tmp_path, routes).value
    assert local.check_card(None, tmp_path, tmp_path / "none").value == "no default route"


def test_a_syncer_on_this_machine_is_reached_over_loopback() -> None:
    assert local.check_card("http://127.0.0.1:7077").figures["card"] == "lo"


# ---- the command -----------------------------------------------------------------------------------------------------


def atoll(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["atoll", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "80")
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the seconds that torch and the kernels take, and with memory enough."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "check_memory", lambda: local.judge_memory(24 * GIB, 20 * GIB))
    monkeypatch.setattr(local, "check_torch", lambda: local.judge_torch(TORCH))
    monkeypatch.setattr(local, "check_kernels", lambda: local.judge_kernels(WARM))


@pytest.mark.usefixtures("quick")
def test_every_check_has_its_line_within_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert atoll(monkeypatch, "doctor") == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    for name in ("python", "torch", "kernels", "memory", "disk syncing", "ports", "network card", "clock"):
        assert any(name in line for line in lines)


@pytest.mark.usefixtures("quick")
def test_what_fails_makes_the_command_fail_and_names_the_next_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "check_torch", lambda: local.judge_torch(None, "No module named 'torch'"))
    assert atoll(monkeypatch, "doctor") == 1
    out = capsys.readouterr().out
    assert "✗ torch" in out and "Learners need it: pip install" in out and "checks fail" in out


def test_without_torch_a_machine_is_fit_for_a_syncer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "is_installed", lambda package: False)
    check = local.check_torch()
    assert check.verdict == "warn" and check.next.endswith(local.install_command("torch"))


@pytest.mark.usefixtures("quick")
def test_the_same_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert atoll(monkeypatch, "doctor", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True and "memory" in {check["name"] for check in told["checks"]}
    assert atoll(monkeypatch, "doctor", "--json", "--syncer", "http://127.0.0.1:9") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert next(check for check in told["checks"] if check["verdict"] == "fail")["name"] == "addresses"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--parameters", "7B"], "--parameters and --step say what a link is to carry"),
        (["--syncer", "http://127.0.0.1:9", "--step", "0"], "--step 0 must be above 0"),
        (["--syncer", "http://127.0.0.1:9", "--parameters", "many"], "--parameters 'many'"),
        (["--join", "http://127.0.0.1:9"], "--join takes a join link, atoll://"),
        (["--join", "atoll://nowhere"], "is no address of a syncer"),
        (["--syncer", "http://192.0.2.1:9"], "use its join link"),
        (["--join", "none.txt"], "--join (or ATOLL_JOIN) names none.txt, which is missing"),
        (["--join", "open.txt"], "open.txt can be read by others on this machine: chmod 600 open.txt"),
        (["--join", "plain.txt"], "--join takes a join link, atoll://…, or a file that holds one"),
        (["--join", "."], "--join takes a join link, atoll://…, or a file that holds one"),
    ],
)
def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, mode in (("open.txt", 0o644), ("plain.txt", 0o600)):
        (tmp_path / name).write_text("http://127.0.0.1:7077\n")
        (tmp_path / name).chmod(mode)
    assert atoll(monkeypatch, "doctor", *words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_a_folder_without_a_syncer_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert atoll(monkeypatch, "doctor", "--syncer", tmp_path) == 2
    assert "holds no run with a syncer" in capsys.readouterr().err


def test_what_is_measured_is_announced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick: None) -> None:
    said: list[str] = []
    list(doctor.examine(tmp_path, announce=said.append))
    assert said == ["Python", "torch", "the kernels", "the machine", "the disk", "the network"]
