"""The way to a syncer as `atoll doctor --join` goes it: real ports with TLS and tokens, and figures judged."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.connect_proxy import FAR, ConnectProxy
from tests.fabric.secured import SECRET, Secured, SecuredDesk, secured_server
from tests.observe.conftest import a_status

from atoll import cli
from atoll.chaos.tcp_relay import Bottleneck, TcpRelay
from atoll.estimate.bandwidth import away_steps, effective_h, load_gbit, profile
from atoll.fabric.address import parse_address
from atoll.fabric.calls import DialResult
from atoll.fabric.server import Server
from atoll.observe.doctor import carry, link, local
from atoll.observe.doctor.carry import LinkLoad, MeasuredLink
from atoll.observe.doctor.link import DialledAddress, MeasuredTransfer, RoundTrip
from atoll.observe.doctor.local import Check
from atoll.protocol.errors import ConfigError
from atoll.telemetry.status import RunStatus

PIN = "ab" * 32
WAY = parse_address(f"atoll://{SECRET}@a.example:1,b.example:2/run/{PIN}", {})
HERE = DialledAddress("https://a.example:1", DialResult(0.012, 0.003, "TLS_AES_256_GCM_SHA384"))
GONE = DialledAddress("https://b.example:2", None, "Connection refused")
LOAD = LinkLoad(parameters=100e6, step_s=0.4)
OUTER: dict[str, Any] = {"rho": 0.31, "outer_step": 1.04, "outer_lr": 0.6}
FAST = MeasuredLink(1e9, 1e9, 0.01)


# ---- judgements ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "verdict", "words"),
    [
        (
            link.judge_trips("https://h:1", [RoundTrip(0.01, None)] * 9 + [RoundTrip(0.9, None)]),
            "ok",
            "10.0 ms to https://h:1, 900",
        ),
        (link.judge_trips("https://h:1", [RoundTrip(0.3, None)]), "warn", "300.0 ms"),
        (link.judge_clock([RoundTrip(0.02, 0.004), RoundTrip(0.4, -0.1)]), "ok", "the same as here (± 10.0 ms)"),
        (link.judge_clock([RoundTrip(0.02, 0.5)]), "ok", "0.50 s ahead of ours (± 10.0 ms)"),
        (link.judge_clock([RoundTrip(0.02, -7.0)]), "warn", "7.0 s behind ours (± 10.0 ms)"),
        (link.judge_clock([RoundTrip(0.02, None)]), "ok", "does not tell its time"),
        (link.judge_bandwidth("bandwidth up", MeasuredTransfer(64 << 20, 1.0)), "ok", "537 Mbit/s (64 MiB in 1.0 s)"),
        (link.judge_bandwidth("bandwidth up", MeasuredTransfer(2 << 20, 3.0)), "warn", "5.6 Mbit/s"),
        (link.judge_addresses(WAY, [HERE]), "ok", "a.example:1 answers in 12.0 ms"),
        (link.judge_addresses(WAY, [HERE, GONE]), "warn", "b.example:2: Connection refused"),
        (link.judge_addresses(WAY, [GONE]), "fail", "b.example:2: Connection refused"),
        (
            carry.judge_load(LOAD, FAST),
            "ok",
            "this link carries H = 24, P = 24 with bf16 at 0.40 s a step and 100M parameters; fp32 too",
        ),
        (carry.judge_load(LOAD, MeasuredLink(300e6, 1e9, 0.01)), "ok", "fp32 would need 1.4x what it has"),
        (carry.judge_load(LOAD, MeasuredLink(100e6, 100e6, 0.01)), "warn", "does not carry H = 24, P = 24 with bf16"),
        (
            carry.judge_load(LOAD, MeasuredLink(1e9, 1e9, 1.2)),
            "ok",
            "a fragment is away for 3.5 steps, τ = 2: about 4 rounds",
        ),
        (carry.judge_load(LOAD, MeasuredLink(1e9, 1e9, 12)), "warn", "a fragment is away for 30 steps, τ = 2"),
        (link.check_shortage(a_status()), "ok", "at most 0 rounds under way"),
        (link.check_shortage(a_status(shortage="a answers slowest")), "warn", "behind H = 24"),
        (link.check_outer_step(a_status()), "ok", "not known yet"),
        (link.check_outer_step(a_status(**OUTER, round=100)), "ok", "not known yet"),
        (link.check_outer_step(a_status(**OUTER)), "ok", "1.04, η = 0.6; ρ of merged gradients is 0.31"),
        (link.check_outer_step(a_status(**{**OUTER, "outer_step": 2.5})), "warn", "2.50, η = 0.6"),
        (link.check_outer_step(a_status(**{**OUTER, "rho": -0.2})), "warn", "ρ of merged gradients is -0.20"),
        (link.check_load(a_status(), FAST, None, 0.4), "ok", "not known yet"),
        (link.check_load(a_status(sync_every=2), FAST, 1e6, 0.4), "warn", "overlap = 2 is not below sync_every = 2"),
    ],
)
def test_a_figure_is_judged(check: Check, verdict: str, words: str) -> None:
    assert (check.verdict, words in check.value) == (verdict, True), check
    assert bool(check.next) == (verdict != "ok"), "what is not well comes with a next step, and nothing else does"


def test_needs_are_those_of_the_bandwidth_calculator() -> None:
    atoll = profile("atoll").run
    spread = msgspec.structs.replace(atoll, step_s=0.4, datacenters=2, learners=2, parameters=100e6)
    (need,) = (one for one in carry.compute_needs(LOAD, FAST) if one.codec == "bf16" and one.sync_every == 24)
    assert need.up_bits_per_s == pytest.approx(1e8 * 16 / 9.6)
    assert need.down_bits_per_s == pytest.approx(1e9 * load_gbit(spread) / (24 * 0.4)) == pytest.approx(1e8 * 32 / 9.6)
    slow = MeasuredLink(100e6, 100e6, 0.01)
    assert carry.find_sustained_h(LOAD, slow) == pytest.approx(effective_h(spread, 0.08)) == pytest.approx(100)
    near = msgspec.structs.replace(spread, latency_s=0.005)
    assert carry.away_steps(LOAD, slow) == pytest.approx(away_steps(near, 0.1)) == pytest.approx(2.01 / 0.4)


def test_a_codec_counts_by_the_size_of_its_bodies() -> None:
    names = ["fp32", "bf16", "int8", "int4", "topk"]
    assert [carry.sized_like(name) for name in names] == names
    with pytest.raises(ConfigError, match="codec = 'nonsense' is not known"):
        carry.sized_like("nonsense")


def test_a_larger_h_is_named_for_a_link_that_is_too_slow() -> None:
    found = carry.judge_load(LOAD, MeasuredLink(100e6, 100e6, 0.01))
    assert [(one["sync_every"], one["codec"], one["carried"]) for one in found.figures["needs"]] == [
        (sync_every, codec, sync_every == 192) for sync_every in (24, 48, 96, 192) for codec in carry.CODECS
    ], "all wait for versions, which come in fp32"
    assert found.next == (
        "Nobody waits, but fragments are synced every 100 steps. It carries sync_every = 192 with bf16. "
        "Versions alone are too much for it: version_codec = int4 is for that."
    )
    hopeless = carry.judge_load(LOAD, MeasuredLink(1e5, 1e5, 0.01))
    assert hopeless.next.endswith("Not even H = 1536 fits: this model needs another link.")


def test_shared_moments_need_more_of_the_link_both_ways() -> None:
    link, shared = MeasuredLink(1e9, 1e9, 0.01), replace(LOAD, moments=True)
    alone, both = (carry.compute_need(load, link, "bf16", 24) for load in (LOAD, shared))
    assert both.up_bits_per_s == pytest.approx((16 + 2 * 8.375) / 16 * alone.up_bits_per_s)
    assert both.down_bits_per_s == pytest.approx((32 + 2 * 8.375) / 32 * alone.down_bits_per_s)


def test_versions_by_a_smaller_codec_need_less_of_the_link() -> None:
    link = MeasuredLink(1e9, 100e6, 0.01)
    assert carry.judge_load(LOAD, link).verdict == "warn"
    smaller = carry.judge_load(replace(LOAD, down="int4"), link)
    assert smaller.verdict == "ok" and smaller.figures["version_codec"] == "int4"
    whole, steps = (carry.compute_need(load, link, "bf16", 24) for load in (LOAD, replace(LOAD, down="int4")))
    assert whole.down_bits_per_s == pytest.approx(32 / 4.25 * steps.down_bits_per_s)
    assert whole.up_bits_per_s == steps.up_bits_per_s


@pytest.mark.parametrize(
    ("count", "took_s", "then"), [(1 << 16, 0.001, 1 << 20), (1 << 20, 0.5, 4 << 20), (1 << 20, 0.9, 2330169)]
)
def test_a_body_grows_until_it_takes_two_seconds(count: int, took_s: float, then: int) -> None:
    assert link.choose_next_size(count, took_s) == then
    assert link.choose_next_size(60 << 20, 0.001) == 64 << 20


def test_a_cipher_has_a_rate() -> None:
    assert (
        min(link.cipher_rate(name, 0.005) for name in ("TLS_AES_128_GCM_SHA256", "TLS_CHACHA20_POLY1305_SHA256")) > 1e6
    )


# ---- real ports ------------------------------------------------------------------------------------------------------


class Run(SecuredDesk):
    """A run with two fragments."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.figures: RunStatus = a_status(phase, step_s=None if phase == "waiting" else 0.4)

    def status(self) -> bytes:
        return msgspec.json.encode(self.figures)

    def manifest(self) -> bytes:
        return json.dumps({"plan": {"fragments": [{"index": 0, "size": 3000}, {"index": 1, "size": 4000}]}}).encode()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback needs no 64 MiB to be measured; and no proxy of this machine is in the way."""
    monkeypatch.setattr(link, "LONGEST", 1 << 20)
    monkeypatch.setattr(link, "CIPHER_S", 0.005)
    for name in ("ATOLL_PROXY", "HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "ATOLL_JOIN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Secured]:
    async with secured_server(tmp_path, handlers=Run("training")) as place:
        yield place


async def checked(way: str, *model: float) -> dict[str, Check]:
    """By name; the doctor has an event loop of its own."""
    return {
        check.name: check
        for check in await asyncio.to_thread(lambda: list(link.check_link(parse_address(way), *model)))
    }


async def test_the_whole_way_is_measured(secured: Secured) -> None:
    found = await checked(secured.link())
    assert list(found) == [
        "addresses",
        "certificate",
        "round trip",
        "syncer's clock",
        "bandwidth down",
        "bandwidth up",
        "TLS",
        "carries",
        "rounds",
        "outer step",
    ]
    assert all(check.verdict == "ok" for check in found.values()), found
    assert abs(found["syncer's clock"].figures["difference_s"]) < 1
    assert found["bandwidth up"].figures["bytes"] == found["bandwidth down"].figures["bytes"] == 1 << 20
    assert found["TLS"].figures["cipher"].startswith("TLS_") and found["TLS"].figures["handshake_s"] > 0
    assert found["certificate"].figures["days_left"] == pytest.approx(30, abs=0.1)
    carries = found["carries"].figures
    assert (carries["parameters"], carries["step_s"], carries["sync_every"]) == (7000, 0.4, 24)
    assert not any(SECRET in json.dumps(check.document()) for check in found.values())


async def test_a_run_that_has_not_begun_is_measured_for_a_model_that_is_named(tmp_path: Path) -> None:
    async with secured_server(tmp_path, handlers=Run("waiting")) as place:
        found = await checked(place.link())
        assert "--parameters N and --step SECONDS would say" in found["carries"].value
        assert "100M parameters" in (await checked(place.link(), 1e8, 0.4))["carries"].value


async def test_an_address_of_a_standby_is_a_warning(secured: Secured) -> None:
    found = await checked(secured.link(more="127.0.0.1:9"))
    assert found["addresses"].verdict == "warn" and "127.0.0.1:9: Connection refused" in found["addresses"].value
    assert found["carries"].verdict == "ok"


async def test_a_certificate_with_few_days_left_is_a_warning(tmp_path: Path) -> None:
    async with secured_server(tmp_path, days=3.0, handlers=Run("training")) as place:
        found = (await checked(place.link()))["certificate"]
    assert found.verdict == "warn" and "counts for 3 more days" in found.value


async def test_a_wrong_token_fails_in_the_syncers_words(secured: Secured) -> None:
    found = await checked(secured.link(secret="0" * 64))
    assert found["syncer"].verdict == "fail" and "this token is not known here" in found["syncer"].value


async def test_a_viewers_token_does_not_measure(tmp_path: Path) -> None:
    async with secured_server(tmp_path, role="viewer", handlers=Run("training")) as place:
        found = await checked(place.link())
    assert "the token 'join' is for a viewer, and this takes a learner" in found["syncer"].value


async def test_another_certificate_fails_before_anything_is_said(secured: Secured) -> None:
    found = await checked(secured.link(pin=PIN))
    assert list(found) == ["addresses"] and found["addresses"].verdict == "fail"
    assert "somebody else answers there, or the link is old" in found["addresses"].value


async def test_nobody_there_fails(secured: Secured) -> None:
    await secured.server.stop()
    found = await checked(secured.link())
    assert list(found) == ["addresses"] and "Connection refused" in found["addresses"].value


@pytest.fixture
async def plain() -> AsyncIterator[Server]:
    server = Server(Run("training"), host="127.0.0.1", port=0)
    await server.start()
    yield server
    await server.stop()
    await asyncio.sleep(0.01)  # a closed transport lets go of its socket in a later turn of the loop


async def test_a_syncer_on_this_machine_is_measured_in_the_clear(plain: Server) -> None:
    found = await checked(f"http://127.0.0.1:{plain.port}")
    assert "TLS" not in found and found["carries"].verdict == "ok"
    assert "in the clear" in found["certificate"].value


async def test_tls_to_a_plain_port_fails(plain: Server) -> None:
    found = await checked(f"atoll://{SECRET}@127.0.0.1:{plain.port}/run/{PIN}")
    assert "it answers, but not in TLS" in found["addresses"].value


async def test_plain_http_to_a_tls_port_fails(secured: Secured) -> None:
    found = await checked(f"http://127.0.0.1:{secured.server.port}")
    assert found["syncer"].verdict == "fail" and "this port speaks TLS" in found["syncer"].value


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b"{}"])
async def test_something_that_is_no_syncer_fails(plain: Server, answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "status", lambda self: answer)
    found = await checked(f"http://127.0.0.1:{plain.port}")
    assert found["syncer"].verdict == "fail" and "syncer" in found["syncer"].next


async def test_a_slow_link_is_measured_as_what_it_is(monkeypatch: pytest.MonkeyPatch, secured: Secured) -> None:
    monkeypatch.setattr(link, "LONGEST", 64 << 20)
    line = TcpRelay("127.0.0.1", secured.server.port)
    line.delay_s = 0.005  # more would fill the small buffer of the line before the bottleneck is
    line.share(Bottleneck(2.5e6), Bottleneck(5e6))
    await line.start()
    try:
        found = await checked(secured.link(port=line.port), 1e7, 1.0)
    finally:
        await line.stop()
    assert 0.01 <= found["round trip"].figures["median_s"] < 0.1
    assert abs(found["syncer's clock"].figures["difference_s"]) <= found["syncer's clock"].figures["uncertain_s"]
    up, down = found["bandwidth up"].figures, found["bandwidth down"].figures
    # A busy machine is slower than the link, and so is what is measured on it: only the upper bound is firm.
    assert 20e6 / 8 < up["bits_per_s"] < 20e6 * 1.25 and 40e6 / 8 < down["bits_per_s"] < 40e6 * 1.25
    assert up["seconds"] > 1 and down["seconds"] > 1
    assert "this link carries H = 24, P = 24 with bf16" in found["carries"].value


# ---- through a proxy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variable", "host"), [("ATOLL_PROXY", "127.0.0.1"), ("HTTPS_PROXY", FAR)])
async def test_all_of_it_goes_through_the_proxy(
    monkeypatch: pytest.MonkeyPatch, secured: Secured, variable: str, host: str
) -> None:
    async with ConnectProxy().open() as proxy:
        monkeypatch.setenv(variable, proxy.url)
        found = await checked(secured.link(host=host))
    assert all(check.verdict == "ok" for check in found.values()), found
    assert f"(through the proxy 127.0.0.1:{proxy.port})" in found["addresses"].value
    assert len(proxy.seen) > 2 << 20 and SECRET.encode() not in bytes(proxy.seen) + "".join(proxy.heads).encode()


async def test_a_proxy_that_is_down_or_refuses_is_named(monkeypatch: pytest.MonkeyPatch, secured: Secured) -> None:
    proxy = ConnectProxy("anna:pass-word")
    async with proxy.open():
        monkeypatch.setenv("ATOLL_PROXY", f"http://anna:pass-word@127.0.0.1:{proxy.port}")
        assert (await checked(secured.link()))["carries"].verdict == "ok"
        monkeypatch.setenv("ATOLL_PROXY", f"http://anna:wrong-one@127.0.0.1:{proxy.port}")
        refused = (await checked(secured.link()))["addresses"]
    down = (await checked(secured.link()))["addresses"]
    assert f"the proxy 127.0.0.1:{proxy.port} does not let us through: 407" in refused.value
    assert f"the proxy 127.0.0.1:{proxy.port} cannot be reached: Connection refused" in down.value
    assert "wrong-one" not in json.dumps([refused.document(), down.document()])


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("--json",), ("--join", "link.txt"), ("ATOLL_JOIN=link.txt",)])
async def test_the_command_says_it_all_without_the_token(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    secured: Secured,
    words: tuple[str, ...],
) -> None:
    torch: dict[str, Any] = {"version": "2.13.0", "import_s": 1.8, "cuda": None, "gpus": [], "mps": False, "threads": 2}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "check_memory", lambda: local.judge_memory(24 << 30, 20 << 30))
    monkeypatch.setattr(local, "check_torch", lambda: local.judge_torch(torch))
    monkeypatch.setattr(local, "check_kernels", lambda: Check("kernels", "ok", "there"))
    (tmp_path / "link.txt").write_text(f"{secured.link()}\n")
    (tmp_path / "link.txt").chmod(0o600)
    in_environment = "link.txt" if words == ("ATOLL_JOIN=link.txt",) else secured.link()
    monkeypatch.setenv("ATOLL_JOIN", "nowhere" if "--join" in words else in_environment)
    words = tuple(word for word in words if "ATOLL_JOIN" not in word)
    monkeypatch.setattr(sys, "argv", ["atoll", "doctor", *words])
    monkeypatch.setenv("COLUMNS", "80")
    await asyncio.to_thread(_ended)
    out, err = capsys.readouterr()
    assert SECRET not in out + err
    for name in ("addresses", "certificate", "round trip", "bandwidth up", "TLS", "this link carries H = 24, P = 24"):
        assert name in out
    if "--json" not in words:
        assert all(len(line) <= 80 for line in out.splitlines())
        assert "what the link would have to carry" in out


def _ended() -> None:
    with suppress(SystemExit):
        cli.main()
