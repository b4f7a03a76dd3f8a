"""Where and with which environment a run's script was started, kept for `--resume`.

    environment.json    the working folder and the environment variables; mode 600, also in a run that others may read

A script that is gone on with starts in the same folder, and with the variables that were set then; what is set now goes
before. Not kept:
- secrets: variables named like one (TOKEN, KEY, PASSWORD, …), and values that hold a password or a join link;
- what belongs to one login, one job or one process (SSH_…, SLURM_…, DISPLAY, TMPDIR, ATOLL_…).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from atoll.store.atomic import write_atomic

NAME = "environment.json"
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CRED|AUTH|COOKIE|PRIVATE|SIGNATURE|_PAT$|_PWD$|DSN|WEBHOOK", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"://[^/\s]*@|atoll://|-----BEGIN")
_OF_THE_SESSION = re.compile(
    r"_|PWD|OLDPWD|SHLVL|SHELL|TERM\w*|COLUMNS|LINES|DISPLAY|WAYLAND_\w+|XAUTHORITY|WINDOWID|TMUX\w*|STY|HOSTNAME|"
    r"TMPDIR|TEMP|TMP|XDG_(RUNTIME|SESSION)\w*|DBUS_\w+|SSH_\w+|GPG_\w+|INVOCATION_ID|JOURNAL_STREAM|"
    r"(SLURM|PBS|LSB|OMPI|PMI|PMIX|KUBERNETES|TORCHELASTIC)_\w+|MASTER_\w+|(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|"
    r"ATOLL_\w+"
)


class LaunchEnvironment(msgspec.Struct, frozen=True):
    folder: str
    """The working folder."""
    variables: dict[str, str]

    def find_missing(self, now: Mapping[str, str]) -> dict[str, str]:
        """Those that were set then and are not now."""
        return {name: value for name, value in self.variables.items() if name not in now}

    def find_folder(self) -> Path | None:
        """None: it is gone, and a script has to start where its supervisor is."""
        return Path(self.folder) if Path(self.folder).is_dir() else None

    def describe_differences(self, now: Mapping[str, str], folder: Path) -> list[str]:
        """What an operator who goes on from here should know."""
        told = []
        if self.find_folder() is None:
            told.append(f"the script was started in {self.folder}, which is gone: it starts in {folder}")
        elif Path(self.folder) != folder:
            told.append(f"the script starts in {self.folder}, as it did before")
        if missing := self.find_missing(now):
            told.append(f"not set now, and as the run was begun with: {', '.join(missing)}")
        return told


def select_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those that are kept."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if not (_SECRET.search(name) or _SECRET_VALUE.search(value) or _OF_THE_SESSION.fullmatch(name))
    }


def capture_environment() -> LaunchEnvironment:
    """As this process has it."""
    return LaunchEnvironment(str(Path.cwd()), select_variables(os.environ))


def write_environment(run: Path, found: LaunchEnvironment) -> None:
    """Note how the script of this run is started; readable by its user alone."""
    before = os.umask(0o077)
    try:
        write_atomic(run / NAME, msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    finally:
        os.umask(before)


def read_environment(run: Path) -> LaunchEnvironment | None:
    """None: of a run whose script was not started here, or by an earlier version."""
    try:
        return msgspec.json.decode((run / NAME).read_bytes(), type=LaunchEnvironment)
    except (OSError, msgspec.MsgspecError):
        return None
