"""What several commands declare alike: headings, the folder of a run, and `--set`."""

from __future__ import annotations

from pathlib import Path

from atoll.choices import CHOICES
from atoll.cli.command import Parameter, argument, option
from atoll.protocol.errors import ConfigError

TRAIN, JOIN, LOOK, TRUST, ASK = (
    "Train",
    "Run by hand, and over machines",
    "Look at a run",
    "Check, repeat and attack",
    "Before you begin",
)
PANELS = (TRAIN, LOOK, JOIN, TRUST, ASK)
"""In the order of `atoll --help`."""
LEARNERS = "4"


def find_run(word: str) -> Path:
    """`first` is also the run in atoll-runs/first."""
    from atoll.store.rundir import named_run

    if "://" in word:
        raise ConfigError(f"{word} is no folder; the run of a bucket comes into one by atoll restore {word} DIR")
    return named_run(Path(word))


def find_shared_run(word: str) -> Path:
    """Of a standby."""
    if "://" in word:
        raise ConfigError(
            f"a standby needs the folder that the syncer writes, on a disk that both machines see, and {word} is none: "
            f"without one, go on from the bucket once the syncer is gone (atoll restore {word} DIR --take-over)"
        )
    return find_run(word)


def find_run_or_bucket(word: str) -> Path | str:
    return word if "://" in word else find_run(word)


def find_run_or_address(word: str) -> str:
    """A file is read: it holds a join link, or an address."""
    from atoll.cli.shared import is_address, read_address

    if is_address(word):
        return word
    found = find_run(word)
    return read_address(found) if found.is_file() else str(found)


def run_argument() -> Parameter:
    text = "A run's folder, the address of its syncer, or a link with a token, also in a file."
    return argument("run", text, find_run_or_address, required=True)


def setting_option(panel: str) -> Parameter:
    """`atoll set` takes the same words."""
    text = "Any setting, as in quorum=2; several times for several."
    return option("--set", text, name="words", many=True, metavar="KEY=VALUE", panel=panel)


def list_choices() -> tuple[str, list[tuple[str, str]]]:
    return "Settings that are a choice", [(one.setting, ", ".join(one.names())) for one in CHOICES]


def describe_choices() -> tuple[str, list[tuple[str, str]]]:
    rows = [(f"{one.setting}={name}", one.describe(name)) for one in CHOICES for name in one.names()]
    return "Settings that are a choice", rows


def suggest_setting(flag: str, for_script: str) -> str:
    """An option that is not there may be meant as a setting; those of the built-in GPT do nothing for a script.
    `for_script`: how the script would get it, where one is named."""
    from atoll.config import known_settings
    from atoll.workloads.settings import WorkloadSettings

    key, known = flag.lstrip("-").replace("-", "_"), known_settings(WorkloadSettings)
    found = [name for name in (key, f"workload.{key}") if name in known]
    if for_script and found == [f"workload.{key}"]:
        return f"{found[0]} is for the built-in GPT; {for_script}"
    return f"it is a setting, --set {' or '.join(f'{name}=VALUE' for name in found)}" if found else ""
