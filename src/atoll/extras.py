"""Packages that only a part of Atoll needs, and the extra that installs each of them (pyproject.toml).

Without any extra Atoll serves, relays, simulates, plans and looks at runs. What needs more says so in one line with the
command that installs it, and before it begins.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

from atoll.protocol.errors import MissingPackage

EXTRAS = {
    "torch": "torch",
    "jax": "jax",
    "optax": "jax",
    "plotly": "plots",
    "matplotlib": "plots",
    "transformers": "hf",
    "accelerate": "hf",
    "lightning": "lightning",
    "ray": "ray",
    "obstore": "store",
    "tensorboard": "tracking",
    "wandb": "tracking",
}


def is_installed(package: str) -> bool:
    """Without importing it."""
    return find_spec(package) is not None


def check_installed(package: str, needed_by: str) -> None:
    """`needed_by`: what the user asked for, as the subject of a sentence."""
    if not is_installed(package):
        raise missing(package, needed_by)


def missing(package: str, needed_by: str, extra: str = "") -> MissingPackage:
    command = install_command(extra or EXTRAS[package])
    words = f"{needed_by} needs {package}, which is not installed here: {command}"
    return MissingPackage(words, name=package)


def install_command(extra: str) -> str:
    """What adds an extra to this environment: from the clone, file or repository that Atoll was installed from, so that
    the command works before there is a release, and brings the same version."""
    from importlib.metadata import PackageNotFoundError, distribution  # 20 ms, and only where something is missing

    try:
        origin = distribution("atoll").read_text("direct_url.json")
    except PackageNotFoundError:
        origin = None
    return f"pip install {read_origin(json.loads(origin) if origin else {}, extra)}"


def read_origin(origin: Mapping[str, Any], extra: str) -> str:
    """`origin`: as pip notes it (PEP 610); nothing of what came from an index."""
    url, folder = str(origin.get("url", "")), str(origin.get("subdirectory", ""))
    path = Path(unquote(urlsplit(url).path)) if url.startswith("file:") else None
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    elif not url or (path is not None and not path.exists()):
        return shlex.quote(f"atoll[{extra}]")
    elif path is not None and not folder:
        return ("-e " if origin.get("dir_info", {}).get("editable") else "") + shlex.quote(f"{path}[{extra}]")
    return shlex.quote(f"atoll[{extra}] @ {url}" + (f"#subdirectory={folder}" if folder else ""))


@contextmanager
def explained(needed_by: str, extra: str = "") -> Iterator[None]:
    """Around imports on behalf of a user's own code; `extra`: what installs all of them. Caught, what is missing is an
    ImportError like any other; where nobody catches it, Python prints the one line alone."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        if not isinstance(sys.excepthook, OneLine):
            sys.excepthook = OneLine(sys.excepthook)
        raise missing(package, needed_by, extra) from None


class OneLine:
    """In place of `sys.excepthook`."""

    def __init__(self, before: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, MissingPackage):
            print(f"atoll: {error}", file=sys.stderr)
        else:
            self._before(kind, error, trace)
