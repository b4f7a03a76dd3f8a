"""Commands as data: their words, options and help, apart from the code that runs them.

A command names the function that runs it; its module is imported when the command is called and not for help, which
would otherwise bring NumPy, the network and numba along (1.5 s of processor time instead of 0.1). The function gets
every parameter by its name. Nothing but the standard library is needed here.

Rules kept here: an option may stand anywhere before `--` and is written `--name VALUE` or `--name=VALUE`; what follows
`--` belongs to the user's script where the command runs one; a mistake is one line that names the nearest option or
command, and exit code 2.
"""

from __future__ import annotations

import difflib
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from atoll.protocol.errors import ConfigError

WIDEST = 100
COLUMN = 30
"""Where the text of an option begins, at the latest."""
HELP = ("--help", "-h")
OptionKind = Callable[[str], Any] | tuple[str, ...]
"""What makes a value of a word (ValueError: it is none), or the words that may be given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    name: str
    """Of the parameter of the function."""
    flags: tuple[str, ...] = ()
    """`--name`, and a letter where there is one; none: an argument."""
    help: str = ""
    kind: OptionKind = str
    metavar: str = ""
    default: Any = None
    shown: str = ""
    """The default in words, where it follows from the settings or is no single value."""
    env: str = ""
    least: float | None = None
    many: bool = False
    required: bool = False
    flag: bool = False
    panel: str = "Options"
    hidden: bool = False
    """Understood, and not in the help: --set says the same."""
    shows: Callable[[], str] | None = None
    """A flag that prints this and ends."""

    @property
    def title(self) -> str:
        """As a person writes it."""
        return self.flags[0] if self.flags else self.metavar or self.name.upper()

    def usage(self) -> str:
        """Of an argument."""
        words = f"{self.title}..." if self.many else self.title
        return words if self.required else f"[{words}]"

    def columns(self) -> tuple[str, str]:
        """What stands at the left of the help, and at its right."""
        left = ", ".join(self.flags) if self.flags else self.title
        if self.flags and not self.flag:
            left += f" {self.metavar or _metavar(self.kind)}"
        default = self.shown or ("" if self.default in (None, False, "", ()) else _written(self.default))
        return left, f"{self.help} [default: {default}]" if default else self.help

    def convert(self, word: str) -> Any:
        if isinstance(self.kind, tuple):
            if word not in self.kind:
                raise ConfigError(f"{self.title} {word}: use one of {', '.join(self.kind)}")
            return word
        try:
            value = self.kind(word)
        except ValueError:
            wanted = {int: "a whole number", float: "a number"}.get(self.kind, "such a value")  # type: ignore[call-overload]
            raise ConfigError(f"{self.title} {word}: {word!r} is not {wanted}") from None
        if self.least is not None and value < self.least:
            raise ConfigError(f"{self.title} {word} is too small: the least is {self.least:g}")
        return value

    def fallback(self) -> Any:
        """Where it is not on the command line."""
        if self.env and (word := os.environ.get(self.env)):
            return self.convert(word)
        return [] if self.many else self.default


def option(flags: str | tuple[str, ...], help: str, kind: OptionKind = str, **more: Any) -> Parameter:
    written = (flags,) if isinstance(flags, str) else flags
    return Parameter(**{"name": written[0].lstrip("-").replace("-", "_"), **more}, flags=written, help=help, kind=kind)


def flag(flags: str | tuple[str, ...], help: str, **more: Any) -> Parameter:
    return option(flags, help, **{"flag": True, "default": False, **more})


def argument(name: str, help: str, kind: OptionKind = str, **more: Any) -> Parameter:
    return Parameter(name=name, help=help, kind=kind, **more)


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    panel: str
    """Under which heading it is listed."""
    text: str
    """Its help; the first line is what the list of commands shows."""
    runs: str
    """`module:function` in atoll.cli; empty: it only has commands of its own."""
    parameters: tuple[Parameter, ...] = ()
    script: bool = False
    """What follows `--` goes to a script: the function's `arguments`."""
    commands: tuple[Command, ...] = ()
    """Its own, of a group. They also take the group's options, before or behind their name."""
    suggest: Callable[[str, str], str] | None = None
    """What to do instead of an option that is not there, and, where a script is named, how that would get the option;
    empty: nothing is known."""
    elsewhere: tuple[tuple[str, str], ...] = ()
    """Names that a group has no command of, and the words that do what is meant."""
    appendix: Callable[[], tuple[str, list[tuple[str, str]]]] | None = None
    """A last table of its help: the heading, and rows."""

    @property
    def summary(self) -> str:
        return " ".join(self.text.partition("\n\n")[0].split())

    def function(self) -> Callable[..., None]:
        module, _, name = self.runs.partition(":")
        found: Callable[..., None] = getattr(import_module(f"atoll.cli.{module}"), name)
        return found


def call(root: Command, words: Sequence[str], program: str = "atoll") -> None:
    """Run the command that the words name, or print the help they ask for."""
    command, path, values = root, program, {}
    left, shared = list(words), list[Parameter]()
    while True:
        found, left = _parse(command, path, left, shared)
        if found is None:
            print(render(command, path, shared))
            return
        values.update(found)
        if not command.commands or not left:
            break
        name, *left = left
        shared += [one for one in command.parameters if not one.shows]
        command, path = _subcommand(command, path, name, left), f"{path} {name}"
    if not command.runs:
        print(render(command, path))
        return
    command.function()(**values)


def _parse(
    command: Command, path: str, words: list[str], shared: Sequence[Parameter]
) -> tuple[dict[str, Any] | None, list[str]]:
    """The values of a command, and for a group what its own command is to parse. None: help is asked for. `shared`: the
    options of its groups, which have their values already unless they are given here."""
    by_flag = {flag: one for one in (*shared, *command.parameters) for flag in one.flags}
    places = [one for one in command.parameters if not one.flags]
    given: dict[str, list[str]] = {}
    loose: list[str] = []
    for_script: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if word == "--":
            (for_script if command.script else loose).extend(rest)
        elif word in HELP:
            return None, []
        elif not word.startswith("-") or word == "-" or word[1:].isdecimal():  # -3 is a number
            loose.append(word)
            if command.commands:  # the rest is that command's own
                loose += rest
        elif (one := by_flag.get(name)) is None:
            instead = _script_option(command, path, words, word, next(rest, "")) if command.script else ""
            raise ConfigError(_unknown_option(command, path, name, by_flag, instead))
        elif one.flag:
            if equals:
                raise ConfigError(f"{name} takes no value: write it alone")
            if one.shows is not None:
                print(one.shows())
                raise SystemExit(0)
            given.setdefault(one.name, []).append(name)
        else:
            value = value if equals else next(rest, "--help")
            if not equals and (value in by_flag or value in HELP):
                raise ConfigError(f"{name} needs a value: {name} {one.metavar or _metavar(one.kind)}")
            given.setdefault(one.name, []).append(value)
    values = {one.name: _value(one, given[one.name]) for one in shared if one.name in given}
    values |= {one.name: _value(one, given.get(one.name)) for one in command.parameters if one.flags and not one.shows}
    if command.commands:
        return values, loose
    left = _place(command, path, places, loose, values)
    if left:
        instead = _script_option(command, path, words, " ".join(left), "") if command.script else ""
        raise ConfigError(f"{path} does not know what to do with {left[0]!r}: {instead or f'see {path} --help'}")
    if command.script:
        values["arguments"] = for_script
    return values, []


def _place(
    command: Command, path: str, places: Sequence[Parameter], loose: list[str], values: dict[str, Any]
) -> list[str]:
    """Words without an option, to the arguments in their order; those that are left over come back."""
    left = list(loose)
    for one in places:
        taken, left = (left, []) if one.many else (left[:1], left[1:])
        if one.required and not taken:
            raise ConfigError(f"{path} needs {one.title}: {_usage(command, path)}")
        values[one.name] = _value(one, taken)
    return left


def _value(one: Parameter, words: list[str] | None) -> Any:
    if not words:
        return one.fallback()
    if one.flag:
        return not words[-1].startswith("--no-")
    return [one.convert(word) for word in words] if one.many else one.convert(words[-1])


def _unknown_option(command: Command, path: str, name: str, known: Iterable[str], for_script: str) -> str:
    suggested = command.suggest(name, for_script) if command.suggest is not None else ""
    names = [one for one in (*known, *HELP) if len(one) > len("--on")]  # of a shorter one the -- alone is near to any
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    meant = f"did you mean {' or '.join(near)}?" if near else ""
    both = f"{meant} If not, {for_script}" if meant and for_script else meant or for_script
    return f"{path} has no option {name}: {suggested or both or f'see {path} --help'}"


def _script_option(command: Command, path: str, words: list[str], word: str, following: str) -> str:
    """How the script that the words name would get this option; empty: they name none."""
    script = next((one for one in words if one.endswith(".py")), "")
    value = f" {following}" if following and "=" not in word and not following.startswith("-") else ""
    before = "".join(f"{one.title} " for one in command.parameters if one.required and one.name != "script")
    return f"options of your script go after --: {path} {before}{script} -- {word}{value}" if script else ""


def _subcommand(group: Command, path: str, name: str, following: Sequence[str]) -> Command:
    for one in group.commands:
        if one.name == name:
            return one
    if instead := dict(group.elsewhere).get(name):
        words = " ".join([path, instead, *following])
        raise ConfigError(f"{path} has no command {name!r}: use {words}")
    near = difflib.get_close_matches(name, [one.name for one in group.commands], n=1, cutoff=0.5)
    raise ConfigError(
        f"{path} has no command {name!r}: {f'did you mean {near[0]!r}?' if near else f'see {path} --help'}"
    )


# ---- help -----------------------------------------------------------------------------------------------------------


def render(command: Command, path: str, shared: Sequence[Parameter] = ()) -> str:
    """`shared`: the options of its groups."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    heading = "\x1b[1m{}\x1b[0m".format if sys.stdout.isatty() and "NO_COLOR" not in os.environ else str
    parts = [f"{heading('Usage:')} {_usage(command, path)}", *_paragraphs(command.text, width)]
    tables: dict[str, list[tuple[str, str]]] = {}
    for one in (one for one in (*command.parameters, *shared) if not one.hidden):
        tables.setdefault(one.panel if one.flags else "Arguments", []).append(one.columns())
    panel = next((one.panel for one in reversed(command.parameters) if one.flags), "Options")
    tables.setdefault(panel, []).append((", ".join(HELP), "Show this text."))
    for sub in command.commands:
        tables.setdefault(sub.panel, []).append((sub.name, sub.summary))
    if command.appendix is not None:
        title, rows = command.appendix()
        tables[title] = rows
    column = min(COLUMN, max((len(left) for rows in tables.values() for left, _ in rows), default=0) + 4)
    for title, rows in tables.items():
        parts.append("\n".join([heading(f"{title}:"), *(line for row in rows for line in _row(*row, column, width))]))
    return "\n\n".join(parts)


def _usage(command: Command, path: str) -> str:
    words = [path, *(["[OPTIONS]"] if any(one.flags for one in command.parameters) else [])]
    words += [one.usage() for one in command.parameters if not one.flags]
    if command.commands:
        words.append("[COMMAND]" if command.runs else "COMMAND")
    return " ".join([*words, *(["[-- ARGS]"] if command.script else [])])


def _paragraphs(text: str, width: int) -> list[str]:
    """Filled to the width; lines that are indented stay as they are."""
    fill = partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    first, _, rest = text.partition("\n\n")
    blocks = [" ".join(first.split()), *textwrap.dedent(rest).strip().split("\n\n")]
    return [
        "\n".join(_wrapped(line, width) for line in block.splitlines()) if "\n  " in block else fill(block)
        for block in blocks
        if block
    ]


def _wrapped(line: str, width: int) -> str:
    """An example, broken where a shell reads on."""
    if len(line) <= width:
        return line
    lines = textwrap.wrap(line, width - 2, subsequent_indent="      ", break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(lines)


def _row(left: str, right: str, column: int, width: int) -> list[str]:
    lines = textwrap.wrap(right, max(20, width - column), break_on_hyphens=False) or [""]
    start = f"  {left}"
    first = [start] if len(start) + 2 > column else []
    head = " " * column if first else start.ljust(column)
    return [*first, (head + lines[0]).rstrip(), *(" " * column + line for line in lines[1:])]


def _metavar(kind: OptionKind) -> str:
    if isinstance(kind, tuple):
        return "|".join(kind)
    return {int: "N", float: "X", str: "TEXT", Path: "PATH"}.get(kind, "TEXT")  # type: ignore[call-overload, no-any-return]


def _written(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
