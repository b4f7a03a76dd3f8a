"""Record of the runs that began here: their scripts may be started again without asking.

    $XDG_STATE_HOME/atoll/runs/MARK     one empty file for each, below ~/.local/state where that is not set; mode 700

A run's folder says what is started when it is gone on with: a script, its arguments, its working folder and variables,
and a bucket that it is copied to. In a folder that came from elsewhere these are somebody else's words. So a digest
of them is kept when a run begins here or is agreed to; `--resume` of any other run asks first. A folder that is moved
or copied on this machine stays known, and one whose words were changed is not.

A run that `atoll restore` claimed counts as begun here: claiming needs the right to write to the bucket, which is the
right to go on with the run anyway (docs/adr/0033).
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from atoll.config import Config, load
from atoll.launch.environment import LaunchEnvironment, read_environment
from atoll.protocol.errors import ConfigError
from atoll.store.rundir import RunDir

MOST = 4096
"""Runs that are remembered; the oldest are forgotten first."""


def remember_run(config: Config, launch: LaunchEnvironment | None) -> None:
    """Note that this run began here. If that cannot be written, `--resume` of the run asks."""
    folder = _find_folder(os.environ)
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / _compute_mark(config, launch)).touch(mode=0o600)
        known = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in known[:-MOST]:
            path.unlink(missing_ok=True)


def check_begun_here(
    out: RunDir, *, trusted: bool, runs_script: bool = True, copies: bool = True, verb: str = "go on with"
) -> None:
    """Ask about a run that did not begin here. ConfigError: the answer is no, or there is no terminal to ask at.

    `runs_script`: the command starts the script that the folder names; `copies`: it copies the run to the bucket that
    the folder names; `verb`: what the command does with the run.
    """
    config, launch = load(out.settings), read_environment(out.path)
    used = _describe(config, launch, runs_script=runs_script, copies=copies)
    if trusted or not used:
        return  # the built-in model, with nothing that the folder says
    if (_find_folder(os.environ) / _compute_mark(config, launch)).exists():
        return
    words = f"{out.path} did not begin here, or was changed since: to {verb} it {', '.join(used)}"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(f"{words}. Where that is right, say --trust")
    print(f"{words}.\nGo on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError(f"{out.path} is left as it is")


def _describe(config: Config, launch: LaunchEnvironment | None, *, runs_script: bool, copies: bool) -> list[str]:
    """List what the folder's own words would do: run a script, set variables, copy the run somewhere."""
    effects = []
    if runs_script and config.script:
        where = f" in {launch.folder}" if launch is not None else ""
        effects.append(f"runs {_show(' '.join(config.script))}{where}")
    elif runs_script and launch is not None:
        effects.append("trains the built-in model")
    if runs_script and launch is not None and (missing := launch.find_missing(os.environ)):
        effects.append(f"sets {_show(', '.join(f'{name}={value}' for name, value in missing.items()))}")
    if copies and config.service.store:
        effects.append(f"copies it to {_show(config.service.store)}")
    return effects


def _show(text: str) -> str:
    """Return the text without control characters, which could change the terminal."""
    return "".join(letter if letter.isprintable() else "·" for letter in text)


def _compute_mark(config: Config, launch: LaunchEnvironment | None) -> str:
    words = (config.script, config.service.store, launch)
    return hashlib.blake2b(msgspec.json.encode(words, order="sorted"), digest_size=16).hexdigest()


def _find_folder(env: Mapping[str, str]) -> Path:
    state = env.get("XDG_STATE_HOME", "")
    return (Path(state) if Path(state).is_absolute() else Path("~/.local/state").expanduser()) / "atoll" / "runs"
