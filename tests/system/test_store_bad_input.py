"""Buckets that cannot be used: one line, before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.system.conftest import Run
from tests.system.stores import BUCKET, LocalS3, possible
from tests.system.stores import s3 as s3

pytestmark = [
    pytest.mark.system,
    pytest.mark.faults,
    pytest.mark.skipif(not possible(), reason="needs obstore and moto: make integrations"),
]

URL = f"s3://{BUCKET}/run"
SHORT = ("--learners", "1", "--steps", "40", "--set", "evaluate_every=0", "--set", "cut_every=12", "--store", URL)


def check_refused(run: Run, words: str, *command: str | Path) -> None:
    refused = run.ask(*(command or ("train", "--out", run.out, *SHORT)))
    assert refused.returncode in (1, 2) and words in refused.stderr, refused.stderr + refused.stdout
    assert refused.stderr.strip().count("\n") == 0, "one line"


def test_credentials_that_are_missing_expired_wrong_or_may_not_write(
    run: Run, s3: LocalS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.refuses = {"PUT": (403, "AccessDenied")}
    check_refused(run, "the credentials may not create there")
    s3.refuses = {"PUT": (400, "ExpiredToken")}
    check_refused(run, "the credentials have expired")
    s3.refuses = {"PUT": (403, "InvalidAccessKeyId")}
    check_refused(run, "the credentials are not accepted")
    s3.refuses = {"GET": (403, "AccessDenied"), "HEAD": (403, "AccessDenied")}
    check_refused(run, "the credentials may not", "restore", URL, run.folder / "copy", "--read-only")
    check_refused(run, "the credentials may not", "verify", URL)
    s3.refuses = {}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    check_refused(run, "no credentials were found")


def test_a_bucket_that_is_not_there_or_does_not_answer(run: Run, s3: LocalS3, monkeypatch: pytest.MonkeyPatch) -> None:
    check_refused(run, "there is no such bucket", "train", "--out", run.out, *SHORT[:-1], "s3://nobodys/run")
    check_refused(run, "holds no run", "verify", f"s3://{BUCKET}/other")
    check_refused(run, "holds no run", "export", f"s3://{BUCKET}/other", run.folder / "model.safetensors")
    check_refused(run, "is not understood", "verify", "http://bucket/run")
    s3.down = True
    check_refused(run, "check the network")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    check_refused(run, "check the network")
