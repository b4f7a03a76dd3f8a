from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.bucket.client import CREDENTIALS, keep_credentials, read_credentials, select_credentials
from atoll.protocol.errors import ConfigError

TERMINAL = {
    "AWS_ACCESS_KEY_ID": "a",
    "AWS_SECRET_ACCESS_KEY": "b",
    "AWS_ENDPOINT_URL": "https://here",
    "AWS_PROFILE": "mine",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/token",
    "AZURE_STORAGE_ACCOUNT_NAME": "c",
    "GOOGLE_SERVICE_ACCOUNT_KEY": "d",
    "HOME": "/root",
}


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("s3://bucket/run", {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"}),
        ("gs://bucket/run", {"GOOGLE_SERVICE_ACCOUNT_KEY"}),
        ("az://bucket/run", {"AZURE_STORAGE_ACCOUNT_NAME"}),
        ("file:///folder", set()),
        ("", set()),
    ],
)
def test_those_of_the_bucket_and_none_of_the_machine(url: str, names: set[str]) -> None:
    assert set(select_credentials(url, TERMINAL)) == names


def test_they_are_kept_for_this_user_alone_and_the_newest_count(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    assert read_credentials(secrets) == {}
    keep_credentials(secrets, {"AWS_SECRET_ACCESS_KEY": "b"})
    assert read_credentials(secrets) == {"AWS_SECRET_ACCESS_KEY": "b"}
    assert (secrets / CREDENTIALS).stat().st_mode & 0o777 == 0o600 and secrets.stat().st_mode & 0o777 == 0o700
    os.chmod(secrets / CREDENTIALS, 0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        read_credentials(secrets)
    keep_credentials(secrets, {})
    assert read_credentials(secrets) == {}
