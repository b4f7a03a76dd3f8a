"""The command line's own: the application, and what several commands share."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console

from atoll.observe.closing import print_closing
from atoll.observe.story import last_sample, story
from atoll.observe.summary import summarise
from atoll.protocol.errors import ConfigError
from atoll.store.atomic import write_atomic
from atoll.store.rundir import RunDir
from atoll.telemetry.events import parse

app = typer.Typer(
    name="atoll",
    help="Train one model on many unreliable islands of compute.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


def close(out: RunDir, console: Console, as_json: bool = False) -> None:
    """The summary, written down and shown."""
    events = list(parse(out.events.read_bytes().splitlines(keepends=True)))
    summary = summarise(events)
    write_summary(out, summary, as_json)
    if not as_json:
        print_closing(console, summary, story(summary, events), last_sample(events), short(out.path))


def write_summary(out: RunDir, summary: dict[str, Any], as_json: bool) -> None:
    text = msgspec.json.format(msgspec.json.encode(summary))
    write_atomic(out.summary, text + b"\n")
    if as_json:
        print(text.decode())


def address_of(run: RunDir) -> str:
    """Where the syncer of a run listens."""
    try:
        return run.address.read_text()
    except OSError as error:
        raise ConfigError(f"{run.path} holds no run with a syncer: name the folder that --out made") from error


def short(path: Path) -> Path:
    """As a person would write it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
