"""Choices by name: found in their packages, checked without importing them, described by their own first line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from atoll import choices
from atoll.choices import ADOPT, CHOICES, CODEC, MERGE, OUTER_OPTIMIZER, PLAN, QUORUM_POLICY, VERSION_CODEC, Choice
from atoll.config import Config, Outer, known_settings, parse
from atoll.protocol.errors import ConfigError

DEFAULTS = {
    MERGE: Outer().merge,
    OUTER_OPTIMIZER: Outer().optimizer,
    CODEC: Config().protocol.codec,
    VERSION_CODEC: Config().protocol.version_codec,
    PLAN: Config().protocol.plan,
    ADOPT: Config().protocol.resolved_adopt,
    QUORUM_POLICY: Config().protocol.quorum_policy,
}
NEEDED = {
    MERGE: "merge_piece",
    OUTER_OPTIMIZER: "make",
    CODEC: "make",
    VERSION_CODEC: "make",
    PLAN: "deal",
    ADOPT: "adopt",
    QUORUM_POLICY: "wait_s",
}


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.setting)
def test_every_choice_can_be_loaded_and_says_what_it_is(choice: Choice) -> None:
    assert DEFAULTS[choice] in choice.names()
    for name in choice.names():
        assert callable(getattr(choice.load(name), NEEDED[choice]))
        assert choice.describe(name).endswith((".", ":"))


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.setting)
def test_a_choice_that_is_not_there_is_answered_with_those_that_are(choice: Choice) -> None:
    place = known_settings()[choice.setting]
    with pytest.raises(ConfigError) as caught:
        parse(f'[{place.table}]\n{place.field} = "nonsense"', "run.toml")
    known = ", ".join(choice.names())
    assert str(caught.value) == f"{choice.setting} = 'nonsense' is not known: use one of {known}"


def test_a_new_module_is_a_new_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No list is edited: what lies in the package is known, by its name and its first line."""
    package = tmp_path / "kinds_of_tea"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "earl_grey.py").write_text('"""With bergamot."""\n\n\ndef pour() -> str:\n    return "tea"\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    tea = Choice("tea", "kinds_of_tea")
    assert tea.names() == ("earl-grey",) and tea.describe("earl-grey") == "With bergamot."
    assert tea.load("earl-grey").pour() == "tea"


def test_names_are_checked_without_arrays() -> None:
    """A syncer's command line, and its help, start without NumPy and torch."""
    code = "import sys; from atoll.config import Config; Config(); print({'numpy', 'torch'} & set(sys.modules))"
    probe = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert probe.stdout.strip() == "set()", probe.stderr


def test_a_name_on_the_wire_is_short_and_plain() -> None:
    """The protocol passes names on; what is no name is refused when it is decoded."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"codec": "../../evil"}, type(Config().protocol))
    assert choices.CODEC.setting == "codec"
