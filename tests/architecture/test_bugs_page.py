"""docs/bugs.md claims mends and tests: each is in the source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "bugs.md").read_text()
CODE = re.compile(r"`([^`]+)`")
PATH = re.compile(r"(?:[a-z_]+/)*[a-z_]+\.(?:py|toml)")
NAME = re.compile(r"(?:[A-Za-z_]+\.)?[A-Za-z_]+")


def rows() -> Iterator[tuple[str, str]]:
    """What each entry says of its fix, and of its test: the last two columns."""
    for line in PAGE.splitlines():
        if line.startswith("| ") and not line.startswith(("| ---", "| what happened")):
            yield tuple(line.strip("| ").split(" | ")[-2:])  # type: ignore[misc]


@cache
def sources(folder: str) -> str:
    return "\n".join(path.read_text() for path in sorted((ROOT / folder).rglob("*.py")))


@cache
def files() -> list[str]:
    folders = (ROOT / name for name in ("src", "tests", "examples"))
    return [str(path.relative_to(ROOT)) for folder in folders for path in folder.rglob("*")]


def is_file(path: str) -> bool:
    return any(file == path or file.endswith(f"/{path}") for file in files())


def is_defined(name: str) -> bool:
    """`Class.method`, `module.function` or a name alone: a function, a class, an attribute or a field of the source."""
    *owner, last = name.split(".")
    if not owner:
        return last in names_defined(sources("src"))
    classes = [text for name, text in classes_of(sources("src")) if name == owner[0]]
    modules = [path.read_text() for path in (ROOT / "src").rglob(f"{owner[0]}.py")]
    return any(last in names_defined(text) for text in (*classes, *modules))


@cache
def classes_of(text: str) -> list[tuple[str, str]]:
    """Name and text."""
    return [(one[1], one[0]) for one in re.finditer(r"^class (\w+).*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)]


@cache
def names_defined(text: str) -> set[str]:
    found = re.findall(r"(?:def|class) (\w+)|^\s*(?:self\.)?(\w+)(?::| =|,)", text, re.MULTILINE)
    return {name or other for name, other in found}


def test_every_mend_is_in_the_source() -> None:
    for fix, _ in rows():
        for code in CODE.findall(fix):
            if PATH.fullmatch(code):
                assert is_file(code), f"{code} is not there, and a mend is said to be in it: {fix}"
            elif NAME.fullmatch(code) and not code.endswith(".json"):
                assert is_defined(code), f"{code} is not in the source, and is said to mend: {fix}"


def test_every_entry_names_a_test_that_is_there() -> None:
    for fix, test in rows():
        named = CODE.findall(test)
        assert named or test == "the storm (docs/chaos.md)", f"no test is named for: {fix}"
        for code in named:
            file, _, function = code.partition("::") if "/" in code or ".py" in code else ("", "", code)
            assert not file or is_file(file), f"{file} is not there: {test}"
            assert not function or f"def {function.partition('[')[0]}(" in sources("tests"), f"there is no {function}"
