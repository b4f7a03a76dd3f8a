"""What the pages say of the code is so: links, paths, names, commands, and the tables that repeat the code's own."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import msgspec
import pytest
from tests.architecture.pages import PAGES, ROOT, name_of, prose, table_after
from tests.architecture.test_bugs_page import is_defined, is_file, sources

from atoll.cli.command import HELP, Command, call
from atoll.cli.declared import ATOLL
from atoll.config import Config, Outer, parse_settings
from atoll.protocol.settings import Settings
from atoll.protocol.syncer.state import PHASES, STAGES

DOCS = ROOT / "docs"
NAMED = [
    *(DOCS / page for page in ("architecture.md", "algorithm.md", "protocol.md", "promises.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]
"""Pages whose every folder is looked for, and of the first three every dotted name."""
SCRIPTS = ("my_script.py", "script.py")
"""The reader's own."""
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
PYTHON = re.compile(r"(?:[a-z_]+/)*[a-z_]+\.py(?:::\w+)?")
FOLDER = re.compile(r"(?:src/atoll/|tests/|benchmarks/|docs/|examples/|tools/)?(?:[a-z_]+/)+")
DOTTED = re.compile(r"[A-Za-z_]+\.[A-Za-z_]+")
SETS = ("train", "syncer", "chaos", "set")
"""Commands that take settings."""
FOR_USERS = [
    page for page in PAGES if page.parent in (ROOT, DOCS) and page.name not in ("LOG.md", "CHANGELOG.md", "bugs.md")
]
OTHERS = ("python ", "pytest ", "make ", "pip", "tar ", "sbatch ", "scancel ", "docker ", "kubectl ", "sky ")
"""Commands that are not ours."""
EXTENSIONS = ("json", "jsonl", "md", "toml", "html", "log", "txt", "lock", "safetensors", "py", "tape", "conf", "svg")


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    text = prose(page.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([^"]+)">', text))


def test_pages_install_from_where_atoll_can_be_had() -> None:
    """A package of that name may be somebody else's as long as ours is on no index; docs/releasing.md has what changes
    with a release."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    ours = r"'?atoll\b" if "dev" in version else r"'?\.(?:\[| |$)"
    wrong = re.compile(rf"pip install (?:-\S+ (?:constraints\.txt )?)*{ours}", re.MULTILINE)
    texts = {page: page.read_text() for page in FOR_USERS if page.name != "releasing.md"}
    texts |= {example: example.read_text() for example in (ROOT / "examples").glob("*.py")}
    assert {page.name: found[0] for page, text in texts.items() if (found := wrong.search(text))} == {}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for text, target in LINK.findall(prose(page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{name_of(page)}: [{text}]({target})"
        assert not anchor or anchor in anchors(found), f"{name_of(page)}: {target} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_test_that_a_link_names_is_in_its_file(page: Path) -> None:
    for text, target in LINK.findall(page.read_text()):
        if text.startswith("`test_"):
            found = (page.parent / target).read_text()
            assert f"def {text.strip('`')}(" in found, f"{target} has no {text}"


def codes(page: Path) -> Iterator[str]:
    return (code for code in CODE.findall(prose(page.read_text())))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_path_is_there(page: Path) -> None:
    for code in codes(page):
        if PYTHON.fullmatch(code) and code not in SCRIPTS:
            file, _, function = code.partition("::")
            assert (ROOT / file).is_file() or is_file(file), f"{name_of(page)}: there is no {file}"
            assert not function or f"def {function}(" in sources("tests"), f"{name_of(page)}: there is no {function}"
        elif (
            page in NAMED
            and FOLDER.fullmatch(code)
            and not code.startswith(("atoll-", "journal/", "cuts/", "learners/", "logs/"))
        ):
            places = (ROOT, ROOT / "src" / "atoll")
            assert any((place / code).is_dir() for place in places), f"{name_of(page)}: there is no {code}"


@pytest.mark.parametrize("page", NAMED[:3], ids=name_of)
def test_every_name_is_in_the_source(page: Path) -> None:
    found = [code for code in codes(page) if DOTTED.fullmatch(code) and not code.endswith(EXTENSIONS)]
    for code in found:
        assert is_defined(code), f"{name_of(page)}: {code} is not in the source"


def test_where_to_look_names_what_is_in_its_files() -> None:
    rows = table_after((DOCS / "protocol.md").read_text(), "## Where to look")
    assert len(rows) == 9
    for *_, files in rows[:-1]:  # the last question has a list of its own
        assert 1 <= check_files(files) <= 3, files


def test_the_reading_list_names_what_is_in_its_files() -> None:
    rows = table_after((DOCS / "protocol.md").read_text(), "### How a killed learner comes back")
    assert [check_files(files) for _, files, _ in rows] == [1] * 9


def check_files(cell: str) -> int:
    """How many files it names; what it names of each is there."""
    found = re.findall(r"\]\(([^)]+)\)(?:: ((?:`\w+`(?:, )?)+))?", cell)
    for target, names in found:
        text = (DOCS / target).read_text()
        for name in CODE.findall(names):
            assert re.search(rf"(?:def|class) {name}\b", text), f"{target} has no {name}"
    return len(found)


# ---- commands -------------------------------------------------------------------------------------------------------


def commands(text: str) -> Iterator[str]:
    """Every `atoll …` of the fenced blocks, without its comment."""
    for block in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for part in line.partition("  #")[0].split("&&"):
                if part.strip().startswith("atoll "):
                    yield part.strip().partition(" > ")[0]


def check_words(words: list[str], **values: object) -> None:
    parse_settings(words)


@pytest.mark.parametrize("page", [page for page in PAGES if list(commands(page.read_text()))], ids=name_of)
def test_every_command_is_understood(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Command, "function", lambda self: check_words if self.name in SETS else lambda **values: None)
    for line in commands(page.read_text()):
        call(ATOLL, shlex.split(line, comments=True)[1:])


def flags(command: Command) -> set[str]:
    own = {flag for one in command.parameters for flag in one.flags}
    return own.union(*map(flags, command.commands))


@pytest.mark.parametrize("page", FOR_USERS, ids=name_of)
def test_every_option_is_one_of_ours(page: Path) -> None:
    known = {*flags(ATOLL), *HELP}
    for code in codes(page):
        if not code.startswith(OTHERS):
            for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", code):
                assert option in known, f"{name_of(page)}: no command has {option} (`{code}`)"
            setting = re.fullmatch(r"--set ([a-z_.]+=\S+)", code)
            if setting and page.name != "what-if.md":  # that page's settings are a profile's
                parse_settings([setting[1]])


# ---- tables that repeat the code's own ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heading", "table"), [("## Phases of a run", PHASES), ("## Stages of a round", STAGES)], ids=["phases", "stages"]
)
def test_the_tables_of_states_are_those_of_the_code(heading: str, table: dict[str, tuple[str, ...]]) -> None:
    rows = table_after((DOCS / "protocol.md").read_text(), heading)
    assert {CODE.findall(name)[0]: tuple(CODE.findall(leads)) for name, leads, _ in rows} == table


@pytest.mark.parametrize(("heading", "kind"), [("## Defaults", Settings), ("The outer step (`config.Outer`)", Outer)])
def test_every_default_is_on_the_page(heading: str, kind: type[Settings] | type[Outer]) -> None:
    rows = table_after((DOCS / "algorithm.md").read_text(), heading)
    shown = {CODE.findall(name)[0]: ast.literal_eval(CODE.findall(default)[0]) for name, default, _ in rows}
    due = {name: getattr(kind(), name) for name in kind.__struct_fields__}
    unset = {"share": "parameters", "initial_codec": "fp32", "progress": "budget"}
    due |= unset if "share" in due else {}
    assert shown == due


def test_every_constant_has_the_value_of_the_code() -> None:
    rows = table_after((DOCS / "algorithm.md").read_text(), "Constants that are not settings")
    assert len(rows) > 20
    for name, value, _ in rows:
        module, _, constant = CODE.findall(name)[0].rpartition(".")
        assert repr(getattr(import_module(module), constant)) == CODE.findall(value)[0], name


def test_the_settings_page_shows_the_defaults() -> None:
    block = re.search(r"^```toml\n(.*?)^```$", (DOCS / "settings.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    shown, defaults = tomllib.loads(block[1]), msgspec.json.decode(msgspec.json.encode(Config()))
    assert shown["protocol"].pop("steps") == 1000, "of the built-in workload"
    assert shown["protocol"].pop("share") == "parameters", "which is unset"
    assert shown["protocol"].pop("initial_codec") == "fp32", "and so is this"
    assert shown["protocol"].pop("progress") == "budget", "and this"
    for table in ("protocol", "outer", "service"):
        assert shown[table] == {name: defaults[table][name] for name in shown[table]}, table


def test_the_recipes_are_quoted_as_they_are() -> None:
    _, *sections = (DOCS / "recipes.md").read_text().split("\n## ")
    quoted = set[Path]()
    for section in sections:
        file = re.search(r"\]\(\.\./(examples/\S+\.py)\)", section)
        assert file is not None, f"{section.splitlines()[0]} names no script"
        script = ROOT / file[1]
        quoted.add(script)
        for block in re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
            for part in block.split("\n\n\n"):
                assert part.strip("\n") in script.read_text(), f"{script.name} has other lines than:\n{part}"
    assert set((ROOT / "examples" / "recipes").glob("*.py")) <= quoted


def test_the_tree_names_every_package() -> None:
    tree = re.search(r"^src/atoll/\n(.*?)^```$", (DOCS / "architecture.md").read_text(), re.MULTILINE | re.DOTALL)
    assert tree is not None
    shown, above = set(), list[str]()
    for indent, name in re.findall(r"^( +)(\w+)/ ", tree[1], re.MULTILINE):
        above = [*above[: len(indent) // 2 - 1], name]
        shown.add("/".join(above))
    source = ROOT / "src" / "atoll"
    assert shown == {str(path.parent.relative_to(source)) for path in source.rglob("*/__init__.py")} - {"."}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_every_experiment_has_its_commit_and_most_their_command() -> None:
    entries = [part for part in re.split(r"\n\n(?=\*\*|## )", (DOCS / "LOG.md").read_text()) if part.startswith("**")]
    assert len(entries) > 20
    for entry in entries:
        title = entry.partition("**")[2].partition("**")[0]
        assert re.search(r"\b[0-9a-f]{7}\b", entry), f"{title} names no commit"
    told = [entry for entry in entries if re.search(r"`(?:python|pytest|atoll|make) ", entry)]
    assert len(told) >= 0.75 * len(entries), "an entry says how it is made again"
