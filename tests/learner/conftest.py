from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _folders_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners' folders lie below the current one: tests that run at the same time do not take each other's names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("atoll.learner.joining.ask_run", lambda syncer: "")  # most have no syncer, but a script of one
