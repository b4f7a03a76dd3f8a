"""The variables that a bucket is opened with, where others open it than whoever named it: the syncers of a cluster.

They are what the terminal had when it started the run or went on with it. They lie in the secrets of the run's folder
(mode 600), which is never uploaded, so that a controller that is started again has them too. Where the terminal had
none, each node's own count: its variables, or its role.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from atoll.store.keys import KeyDir, check_private

NAME = "store-credentials.json"
_FAMILIES = {"s3": "AWS_", "s3a": "AWS_", "gs": "GOOGLE_", "file": "", "": ""}
"""By scheme, how their names begin; the others are Azure's. A folder needs none, nor does a run without a store."""
_OF_A_MACHINE = re.compile(r"AWS_(PROFILE|CONFIG_FILE|SHARED_CREDENTIALS_FILE|CONTAINER_\w+|WEB_IDENTITY_\w+|ROLE_\w+)")
"""Where a machine has its role, and files in its home: elsewhere they lead nowhere."""


def select_credentials(url: str, environment: Mapping[str, str]) -> dict[str, str]:
    family = _FAMILIES.get(urlsplit(url).scheme, "AZURE_")
    return {
        name: value
        for name, value in sorted(environment.items())
        if family and name.startswith(family) and not _OF_A_MACHINE.fullmatch(name)
    }


def keep_credentials(secrets: Path, found: Mapping[str, str]) -> None:
    """In place of those that were kept before."""
    keys = KeyDir.create(secrets)
    if found:
        keys.write(keys.path / NAME, msgspec.json.encode(found))
    else:
        (keys.path / NAME).unlink(missing_ok=True)


def read_credentials(secrets: Path) -> dict[str, str]:
    """Those that were kept; empty: none."""
    path = secrets / NAME
    if not path.exists():
        return {}
    check_private(path)
    return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
