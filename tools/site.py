"""The documentation as a site: `make docs`.

    python tools/site.py            # build/site/index.html
    python tools/site.py --pages    # only build/pages, for `zensical serve`

The pages stay plain markdown that reads well in the repository. Here they are copied to build/pages, their links to
files outside of docs/ are turned to pages of the site (or to plain text where it has none), Zensical builds them by
zensical.toml, strictly. Long names in tables are made breakable, and the result is looked at once more: every link of
every page leads to a file and a heading that are there, every page is in the navigation, and nothing is loaded from
another host.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
STAGED = ROOT / "build" / "pages"
SITE = ROOT / "build" / "site"
TOP_PAGES = {
    "CHANGELOG.md": "project/changelog.md",
    "CODE_OF_CONDUCT.md": "project/code-of-conduct.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "README.md": "index.md",
    "SECURITY.md": "project/security.md",
}
"""Pages outside of docs/ and where they are in the site; the README's place is taken by docs/index.md."""
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
LIST = re.compile(r"(?:[-*]|\d+\.) ")
LANGUAGES = {
    ".py": "python",
    ".toml": "toml",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".sbatch": "sh",
    ".sh": "sh",
    ".conf": "",
}


# ---- pages ----------------------------------------------------------------------------------------------------------


def place_of(path: Path) -> str | None:
    """Where a file or folder of the repository is in the site."""
    name = path.relative_to(ROOT).as_posix()
    if name in TOP_PAGES:
        return TOP_PAGES[name]
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix() if path.is_file() else None
    if name == "Dockerfile":
        return "examples/Dockerfile.md"
    if path.is_relative_to(EXAMPLES):
        return f"{name}/index.md" if path.is_dir() else f"{name}.md"
    return None


def turn_links(text: str, source: Path, place: str) -> str:
    """Links as they are in the repository to links between pages of the site."""

    def turn(link: re.Match[str]) -> str:
        mark, words, target = link.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return link[0]
        led = place_of((source.parent / path).resolve())
        if led is None:
            return words
        if led == "index.md" and path.endswith("README.md"):
            anchor = ""
        return f"{mark}[{words}]({os.path.relpath(led, Path(place).parent)}{'#' + anchor if anchor else ''})"

    return LINK.sub(turn, text)


def part_lists(text: str) -> str:
    """With a blank line before a list that follows a paragraph: GitHub needs none, Python's markdown does."""
    lines, before = [], ""
    for line in text.splitlines():
        inside = LIST.match(before) or before.startswith((" ", "|", "#"))
        if LIST.match(line) and before and not inside:
            lines.append("")
        lines.append(line)
        before = line
    return "\n".join(lines) + "\n"


def stage_page(source: Path, place: str) -> None:
    parts = FENCE.split(source.read_text())
    for number in range(0, len(parts), 2):
        parts[number] = part_lists(turn_links(COMMENT.sub("", parts[number]), source, place))
    write(place, "".join(parts))


def stage_example(source: Path) -> None:
    """A file as a page, whole."""
    place, name = place_of(source), source.relative_to(ROOT).as_posix()
    assert place is not None
    language = LANGUAGES.get(source.suffix, "dockerfile" if source.name == "Dockerfile" else "")
    write(
        place, f"# {source.name}\n\n`{name}` of the repository.\n\n```{language}\n{source.read_text().rstrip()}\n```\n"
    )


def stage_folder(folder: Path) -> None:
    """A page that lists a folder of examples, with the first line of what each says of itself."""
    rows = []
    for path in sorted(folder.iterdir()):
        if not path.name.startswith(("_", ".")):
            place = place_of(path)
            assert place is not None
            rows.append(f"| [{path.name}]({os.path.relpath(place, folder.relative_to(ROOT))}) | {said_of(path)} |")
    table = "\n".join(rows)
    write(
        f"{folder.relative_to(ROOT).as_posix()}/index.md",
        f"# {folder.name}\n\n| file | what |\n| --- | --- |\n{table}\n",
    )


def said_of(path: Path) -> str:
    if path.is_dir():
        return "files"
    for line in path.read_text().splitlines():
        words = line.strip().lstrip("#").strip(' "')
        if words and not words.startswith(("!", "SBATCH")):
            return words.replace("|", "\\|") if line.startswith(("#", '"""')) else ""
    return ""


def write(place: str, text: str) -> None:
    path = STAGED / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def stage() -> None:
    shutil.rmtree(STAGED, ignore_errors=True)
    for path in sorted(DOCS.rglob("*")):
        place = path.relative_to(DOCS).as_posix()
        if path.suffix == ".md":
            stage_page(path, place)
        elif path.is_file() and path.suffix in (".svg", ".png", ".css"):
            (STAGED / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, STAGED / place)
    for name, place in TOP_PAGES.items():
        if name != "README.md":
            stage_page(ROOT / name, place)
    for path in (EXAMPLES, *sorted(EXAMPLES.rglob("*"))):
        if "__pycache__" not in path.parts:
            (stage_folder if path.is_dir() else stage_example)(path)
    stage_example(ROOT / "Dockerfile")


# ---- the built site -------------------------------------------------------------------------------------------------


def soften_cells(html: str) -> str:
    """Paths and names of tests in a table may be broken behind / and _: else a column of them takes all the room."""

    def soften(code: re.Match[str]) -> str:
        return re.sub(r"\S{24,}", lambda word: re.sub(r"(?<=[/_:])(?=\w)", "<wbr>", word[0]), code[0])

    return CELL.sub(lambda cell: re.sub(r"(?<=<code>)[^<]+", soften, cell[0]), html)


@dataclass
class Looked(HTMLParser):
    """What a built page has and what it leads to."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if "id" in found:
            self.ids.add(found["id"])
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(found["href"])
        elif "src" in found:
            self.loaded.append(found["src"])


def look(page: Path) -> Looked:
    looked = Looked()
    looked.feed(page.read_text())
    return looked


def find_faults() -> Iterator[str]:
    pages = {page: look(page) for page in sorted(SITE.rglob("*.html")) if page.name != "404.html"}
    for page, looked in pages.items():
        name = page.relative_to(SITE)
        for target in (*looked.links, *looked.loaded):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                if target in looked.loaded and parts.scheme != "data":
                    yield f"{name} loads {target}"
                continue
            led = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            led = led / "index.html" if led.is_dir() else led
            if not led.exists():
                yield f"{name} leads to {target}, which is not there"
            elif parts.fragment and led in pages and unquote(parts.fragment) not in pages[led].ids:
                yield f"{name} leads to {target}, a heading that is not there"
    for sheet in sorted(SITE.rglob("*.css")):
        for target in re.findall(r"url\([\"']?((?:https?:)?//[^)\"']+)", sheet.read_text()):
            yield f"{sheet.relative_to(SITE)} loads {target}"


def find_lost() -> Iterator[str]:
    """Pages that are not in the navigation; those of examples are linked from their list."""

    def places(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, list):
            for one in entry:
                yield from places(one)
        elif isinstance(entry, dict):
            yield from places(list(entry.values()))

    listed = set(places(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    staged = {path.relative_to(STAGED).as_posix() for path in STAGED.rglob("*.md")}
    for place in sorted(staged - listed):
        if not place.startswith(("examples/", "adr/")):
            yield f"{place} is not in the navigation (zensical.toml)"
    for place in sorted(listed - staged):
        yield f"zensical.toml names {place}, which is not there"


def main() -> int:
    stage()
    faults = list(find_lost())
    if "--pages" not in sys.argv[1:]:
        shutil.rmtree(SITE, ignore_errors=True)
        zensical = [str(Path(sys.executable).parent / "zensical"), "build", "--clean", "--strict"]
        if subprocess.run(zensical, cwd=ROOT).returncode:
            return 1
        for page in SITE.rglob("*.html"):
            page.write_text(soften_cells(page.read_text()))
        faults += find_faults()
    for fault in faults:
        print(fault, file=sys.stderr)
    if not faults and SITE.exists():
        print(f"{len(list(SITE.rglob('*.html')))} pages: {(SITE / 'index.html').relative_to(ROOT)}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
