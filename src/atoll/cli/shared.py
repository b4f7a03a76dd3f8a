"""What several commands do alike: settings from a file, the address of a run, the closing summary."""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from rich.console import Console

from atoll.config import convert, merged, parse_settings
from atoll.extras import check_installed
from atoll.fabric.address import SCHEME, SyncerAddress, parse_address, without_secrets
from atoll.fabric.certificates import fingerprint
from atoll.fabric.local_secrets import published_secrets
from atoll.launch.resume import describe_unspent
from atoll.numerics import kernels
from atoll.observe.story import find_shortfall, last_sample, print_closing, story
from atoll.observe.summary import summarise
from atoll.protocol.errors import ConfigError
from atoll.store.atomic import write_atomic
from atoll.store.event_parts import read_lines
from atoll.store.head import read_account
from atoll.store.keys import KeyDir, check_private, read_link
from atoll.store.rundir import RunDir, find_runs
from atoll.store.writer_lease import syncer_holding
from atoll.syncer.credentials import local_tokens, read_tokens
from atoll.telemetry.events import parse

WAIT_S = 30.0
"""How long a new run waits for its learners, where nothing else is said: half of what a learner waits for the run."""
OPERATOR = "operator"
"""Whose certificate commands on the syncer's machine show, under mutual TLS."""


def document_of(path: Path | None) -> dict[str, Any]:
    """A settings file as it is, before the command line's own words."""
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def settings_of(
    document: dict[str, Any], words: Sequence[str], workload: type[msgspec.Struct] | None
) -> dict[str, Any]:
    """The settings of a new run, with what the command line sets on top. Nobody trains before all its learners are
    here, or that time is over."""
    said = merged(document, parse_settings(words, workload))
    protocol = said.setdefault("protocol", {})
    if isinstance(protocol, dict):
        protocol.setdefault("wait_for_learners_s", WAIT_S)
    return said


def setting_words(words: Sequence[str], *, robust: bool, **given: float | str | None) -> list[str]:
    """Options that are settings, and the words of --set behind them: of two for one setting the last counts."""
    named = [f"{key}={value}" for key, value in given.items() if value is not None]
    return [*named, *(["robust=true"] if robust else []), *words]


def without_own_shards(words: Sequence[str], folder: Path) -> list[str]:
    """Whoever goes on with a run may name the number of shards that it has."""
    path = folder / "run.toml"
    has = document_of(path).get("service", {}).get("shards", 1) if path.is_file() else 1
    return [word for word in words if word != f"shards={has}"]


def check_workload(script: object) -> None:
    """Where there is no script of the user's own, the built-in GPT trains."""
    if not script:
        check_installed("torch", "the built-in GPT")


def check_store(url: str) -> None:
    """Before anything is made of a run that is copied there."""
    if url:
        check_installed("obstore", "--store")


def compile_kernels(console: Console, waits: str = "") -> None:
    """Compile the kernels before several processes start that would each do it. `waits`: who waits, for the log."""
    if not kernels.are_compiled():
        console.print(f"compiling the kernels (only the first time; about half a minute){waits} …", style="dim")
        kernels.warm()


def close(out: RunDir, console: Console, as_json: bool = False, again: str = "atoll train", failure: str = "") -> str:
    """The summary, written down and shown. `failure`: why the run failed, where that is known. Returns it, or what the
    events tell of it; empty: it did not fail."""
    events = list(parse(read_lines(out.events)))
    summary = summarise(events, read_account(out))
    failure = failure or find_shortfall(summary, events)
    summary["failure"] = failure or None
    summary["algorithm"] = document_of(out.settings if out.settings.exists() else None).get("algorithm", "decoupled")
    write_summary(out, summary, as_json)
    if not as_json:
        told, sample = story(summary, events), last_sample(events)
        print_closing(console, summary, told, sample, short(out.path), again, describe_unspent(out))
    return failure


def close_unseen(out: RunDir, failure: str) -> str:
    """The same where nobody looks: in a controller (launch/on_ray)."""
    return close(out, Console(quiet=True), failure=failure)


def read_failure(run: RunDir) -> str:
    """Why a run failed that wrote a summary; empty: it did not fail, or wrote none."""
    return str(read_summary(run).get("failure") or "")


def read_summary(run: RunDir) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(run.summary.read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def write_summary(out: RunDir, summary: dict[str, Any], as_json: bool) -> None:
    text = msgspec.json.format(msgspec.json.encode(summary))
    write_atomic(out.summary, text + b"\n")
    if as_json:
        print(text.decode())


def address_of(run: RunDir) -> str:
    """Where the syncer of a run listens; with the operator's token, where one is asked for."""
    if not run.path.exists():
        raise ConfigError(f"{run.path} is not there: name a run's folder, or a file that holds a join link")
    try:
        url = run.address.read_text()
    except OSError as error:
        raise ConfigError(f"{run.path} holds no run with a syncer: name the folder that --out made") from error
    service = convert(document_of(run.settings if run.settings.exists() else None), str(run.settings)).service
    if not service.keys:
        return _local_address(run, url)
    keys = KeyDir.open(Path(service.keys))
    if (token := read_tokens(keys).with_role("operator", time.time())) is None:
        raise ConfigError(f"{keys.tokens} has no operator's token that counts: atoll tokens add NAME --role operator")
    if service.mutual and "ATOLL_CERT" not in os.environ:
        _show_certificate(keys)
    pin = fingerprint(keys.certificate.read_bytes()) if url.startswith("https") else ""
    return SyncerAddress(urls=(url,), token=token.secret, pin=pin).link()


def _local_address(run: RunDir, url: str) -> str:
    """Requests find the secrets by the address. Where they were published is another folder for a process with another
    environment: then the run's own are shown, while a syncer has the run."""
    parts = urlsplit(url)
    if published_secrets(parts.hostname or "", parts.port or 0):
        return url
    if not (run.secrets.is_dir() and syncer_holding(run.journal)):
        return url
    return SyncerAddress(urls=(url,), token=local_tokens(run.secrets).named("operator").secret).link()


def _show_certificate(keys: KeyDir) -> None:
    """Where learners must bring one, so must whoever looks after them."""
    certificate, key = keys.of_learner(OPERATOR)
    if not certificate.is_file():
        raise ConfigError(f"{certificate} is not there, and this syncer asks for it: atoll cert --learner {OPERATOR}")
    check_private(key)
    os.environ.update(ATOLL_CERT=str(certificate), ATOLL_KEY=str(key))


def where(run: str) -> str:
    """Where a syncer is, by a run's folder, an address or a join link."""
    if run.startswith("https://"):
        return _secured_address(run.rstrip("/"))
    if is_address(run):
        parse_address(run)
        return run
    return address_of(RunDir(Path(run).absolute()))


def read_address(file: Path) -> str:
    """The join link, or the address, that a file holds."""
    try:
        with file.open(errors="replace") as text:
            holds_one = is_address(text.read(64).lstrip())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    if not holds_one:
        raise ConfigError(
            f"{file} is a file without a join link in it: name a run's folder, the address of its syncer, or a file "
            "that holds a join link (atoll tokens link)"
        )
    return read_link(str(file), "the command")


def is_address(run: str) -> bool:
    """Whether it names a syncer, and no folder."""
    return run.startswith(("http://", "https://", SCHEME))


def _secured_address(url: str) -> str:
    """The link that opens an https address: the one that ATOLL_JOIN names, or that of a run here whose syncer listens
    there."""
    named = os.environ.get("ATOLL_JOIN", "")
    joined = read_link(named) if named else ""
    if joined.startswith(SCHEME) and url in parse_address(joined).urls:
        return joined
    for run in find_runs():
        if run.address.exists() and run.address.read_text().strip() == url:
            return address_of(run)
    raise ConfigError(
        f"{without_secrets(url)} asks for a token and a certificate: name the run's folder, or the join link that its "
        "syncer printed (atoll tokens link)"
    )


def short(path: Path) -> Path:
    """As a person would write it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
