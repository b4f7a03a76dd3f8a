# ruff: noqa: E501 (sentences of the pages)
"""The reference pages, from the code: API, commands, settings, events, metrics, exit codes, variables, glossary.

    python tools/reference.py           # which pages of docs/reference are not what the code says
    python tools/reference.py --write

Nothing is run but the declarations of the commands: the rest is read from the source, so torch is not needed.
tests/architecture/test_reference.py holds the pages against this.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "atoll"
PAGES = ROOT / "docs" / "reference"
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ["COLUMNS"] = "100"

from atoll.cli.command import Command, Parameter, render  # noqa: E402
from atoll.cli.declared import ATOLL  # noqa: E402
from atoll.protocol.errors import AtollError  # noqa: E402

MADE = "<!-- made by tools/reference.py from the code: change it there -->"
API = {
    "atoll.Learner": ("learner/learner.py", "Learner"),
    "atoll.attach": ("learner/attach.py", "attach"),
    "atoll.evaluate": ("learner/evaluate.py", "evaluate"),
    "atoll.KeptMoments": ("learner/kept_moments.py", "KeptMoments"),
    "atoll.kept_moments": ("learner/kept_moments.py", "kept_moments"),
    "atoll.integrations.jax.Learner": ("integrations/jax.py", "Learner"),
    "atoll.integrations.jax.evaluate": ("integrations/jax.py", "evaluate"),
    "atoll.integrations.jax.load": ("integrations/jax.py", "load"),
    "atoll.integrations.jax.AS_TORCH": ("integrations/jax.py", "AS_TORCH"),
    "atoll.integrations.hf.joined": ("integrations/hf.py", "joined"),
    "atoll.integrations.hf.AtollCallback": ("integrations/hf.py", "AtollCallback"),
    "atoll.integrations.lightning.AtollCallback": ("integrations/lightning.py", "AtollCallback"),
    "atoll.integrations.loaders.lease_samples": ("integrations/loaders.py", "lease_samples"),
    "atoll.integrations.loaders.share_stream": ("integrations/loaders.py", "share_stream"),
    "atoll.integrations.loaders.follow_run": ("integrations/loaders.py", "follow_run"),
}
BASES = {"BaseLearner": "learner/learner.py"}
CALLBACKS = "on_train", "on_step", "on_epoch", "on_exception"
"""Methods that a library calls, not a user."""
VARIABLES = {
    "ATOLL_JOIN": "A join link, a file (mode 600) that holds one, or an address on this machine: the run that a script, `atoll learn` and others join.",
    "ATOLL_SYNCER": "Where the syncer listens on this machine, for `atoll learn`; several with commas. For processes that `atoll train` starts it is set.",
    "ATOLL_LEARNER": "This learner's name in the run (`--name`).",
    "ATOLL_FOLDER": "Where a learner keeps its name and its part of snapshots (`--folder`).",
    "ATOLL_CA": "The authority of the syncer's certificate (`--ca`).",
    "ATOLL_CERT": "A learner's own certificate, for mutual TLS (`--cert`) …",
    "ATOLL_KEY": "… and its key (`--key`).",
    "ATOLL_PROXY": "An HTTP proxy to dial through (`--proxy`); without it HTTPS_PROXY.",
    "ATOLL_KEYS": "The folder that `atoll cert` made, for `atoll tokens` (`--keys`).",
    "ATOLL_PLACEMENT": "host, device or auto: where base and feedback of a learner are, unless `Learner(placement=)` says it.",
    "ATOLL_RUN_TOML": "For a script to read: the file with the run's settings, where `atoll train` started it.",
    "ATOLL_SEED": "For a script to read: the run's seed, where `atoll train` started it.",
    "ATOLL_THREADS": "For a script to read: threads that this learner should use, where `atoll train` started it.",
    "ATOLL_DIRECT": "0: a courier always copies bodies instead of handing its memory to the socket. For measurements.",
}
"""What a user may set or read."""
INTERNAL = {
    "ATOLL_BACKEND", "ATOLL_CHECKPOINT", "ATOLL_CHECKPOINT_EVERY", "ATOLL_EXACT", "ATOLL_GROUPS", "ATOLL_INIT",
    "ATOLL_LINK", "ATOLL_MEETING", "ATOLL_MODELS", "ATOLL_RANK", "ATOLL_RANKS", "ATOLL_REPLAY", "ATOLL_ROLE",
    "ATOLL_RUN", "ATOLL_STATE", "ATOLL_STEPS", "ATOLL_SUPERVISOR",
}  # fmt: skip
"""What our own processes tell each other."""


# ---- reading the source ---------------------------------------------------------------------------------------------


def read(path: str) -> ast.Module:
    return ast.parse((SOURCE / path).read_text())


def find(tree: ast.AST, name: str) -> ast.ClassDef | ast.FunctionDef:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
    raise LookupError(name)


def told(node: ast.ClassDef | ast.FunctionDef) -> str:
    return ast.get_docstring(node) or ""


def signature(name: str, function: ast.FunctionDef, *, bound: bool = False) -> str:
    """As it is called, broken into lines where it is long."""
    given = ast.parse(ast.unparse(function.args).join(("def f(", "): ..."))).body[0]
    assert isinstance(given, ast.FunctionDef)
    if bound:
        given.args.args = given.args.args[1:]
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    line = f"{name}({ast.unparse(given.args)}){returns}"
    if len(line) <= 100:
        return line.removesuffix(" -> None")
    inside = re.split(r", (?![^\[({]*[\])}])", ast.unparse(given.args))
    return f"{name}(\n" + "".join(f"    {one},\n" for one in inside) + f"){returns}".removesuffix(" -> None")


def fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Name, default and text of every field of a struct; the name as in a file of settings."""
    for at, one in enumerate(node.body):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            behind = node.body[at + 1] if at + 1 < len(node.body) else None
            text = ""
            if isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant):
                text = " ".join(str(behind.value.value).split())
            default = ast.unparse(one.value) if one.value is not None else ""
            name = one.target.id
            if renamed := re.fullmatch(r"msgspec\.field\(name='(\w+)'\)", default):
                name, default = renamed[1], ""
            yield name, default, text


def cell(text: str) -> str:
    return text.replace("|", "\\|")


# ---- pages ----------------------------------------------------------------------------------------------------------


def write_api() -> str:
    parts = [
        "# Python API\n\nEvery public name, with its own text. How they are used: [your own script](../scripts.md)."
    ]
    for name, (path, inner) in API.items():
        parts.append(f"## {name}")
        if inner.isupper():
            parts += write_constant(path, inner)
            continue
        node = find(read(path), inner)
        if isinstance(node, ast.FunctionDef):
            parts += [fence(signature(name, node)), told(node)]
            continue
        try:
            made = find(node, "__init__")
            assert isinstance(made, ast.FunctionDef)
            parts.append(fence(signature(name, made, bound=True)))
        except LookupError:
            parts.append("\n".join(f"- `{field}`: {text}" for field, _, text in fields(node)))
        parts.append(told(node))
        bases = find_bases(node)
        parts += list(write_members(node, inner))
        if name == "atoll.Learner":
            parts += [part for base in bases for part in write_members(base, inner)]
        elif bases:
            parts.append("All else is as of [atoll.Learner](#atolllearner).")
    return "\n\n".join(part for part in parts if part) + "\n"


def write_constant(path: str, name: str) -> list[str]:
    body = read(path).body
    [at] = [at for at, node in enumerate(body) if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name]
    behind = body[at + 1]
    assert isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant)
    return [fence(ast.get_source_segment((SOURCE / path).read_text(), body[at]) or ""), str(behind.value.value)]


def find_bases(node: ast.ClassDef) -> list[ast.ClassDef]:
    """Classes of ours that it is made of, by their names."""
    names = {base.id for base in node.bases if isinstance(base, ast.Name)} & BASES.keys()
    found = [find(read(BASES[name]), name) for name in sorted(names)]
    return [base for base in found if isinstance(base, ast.ClassDef)]


def write_members(node: ast.ClassDef, owner: str) -> Iterator[str]:
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and not one.name.startswith(("_", *CALLBACKS)):
            asked = any(isinstance(mark, ast.Name) and mark.id == "property" for mark in one.decorator_list)
            yield f"### {owner}.{one.name}"
            yield (
                fence(f"{one.name}: {ast.unparse(one.returns) if one.returns else ''}")
                if asked
                else fence(signature(one.name, one, bound=True))
            )
            yield told(one)


def fence(text: str, language: str = "python") -> str:
    return f"```{language}\n{text}\n```"


def write_commands() -> str:
    parts = ["# Commands\n\nThe help of every command. `atoll COMMAND --help` prints the same."]

    def add(command: Command, path: str, shared: tuple[Parameter, ...], depth: int) -> None:
        parts.append(f"{'#' * depth} {path}\n\n{fence(render(command, path, shared), 'text')}")
        for sub in command.commands:
            add(sub, f"{path} {sub.name}", (*shared, *command.parameters), min(depth + 1, 4))

    parts.append(fence(render(ATOLL, "atoll"), "text"))
    for command in ATOLL.commands:
        add(command, f"atoll {command.name}", (), 2)
    return "\n\n".join(parts) + "\n"


def write_settings() -> str:
    config, rules = read("config.py"), read("protocol/settings.py")
    tables = [
        ("The run", find(config, "Config"), "At the top of the file."),
        ("[protocol]", find(rules, "Settings"), "The rules; by `--set NAME=VALUE`."),
        ("[outer]", find(config, "Outer"), "Merge and outer step; `lr`, `momentum` and `optimizer` are `outer_lr` … on a command line."),
        ("[service]", find(config, "Service"), "The syncer."),
        ("[[scavenge]]", find(config, "ScavengePlan"), "Plans of hours."),
        ("[[phases]]", find(read("protocol/phases.py"), "TrainingPhase"), "Phases of training ([what they do](../algorithm.md#phases-of-training))."),
        ("[workload]", find(read("workloads/settings.py"), "WorkloadSettings"), "Of the built-in GPT; `--set workload.NAME=VALUE`."),
    ]  # fmt: skip
    parts = [
        "# Every setting\n\nNames, defaults and texts as in the code. The usual ones with their reasons: [settings](../settings.md)."
    ]
    noted = read_comments()
    for title, node, text in tables:
        assert isinstance(node, ast.ClassDef)
        rows = [
            f"| `{name}` | {f'`{cell(default)}`' if default else ''} | {cell(said or noted.get((title, name), ''))} |"
            for name, default, said in fields(node)
            if default not in ("Settings()", "Outer()", "Service()", "{}")
        ]
        parts.append(
            f"## {title}\n\n{text}\n\n| setting | default | meaning |\n| --- | --- | --- |\n" + "\n".join(rows)
        )
    return "\n\n".join(parts) + "\n"


def read_comments() -> dict[tuple[str, str], str]:
    """What the file of defaults in docs/settings.md says behind a setting, by table and name."""
    block = (ROOT / "docs" / "settings.md").read_text().partition("```toml\n")[2].partition("```")[0]
    found, table = dict[tuple[str, str], str](), "The run"
    for line in block.splitlines():
        if line.startswith("["):
            table = line.partition("]")[0] + "]"
        elif said := re.match(r"(\w+) = .*?  # (.+)", line):
            found[table, said[1]] = re.sub(r"\(([\w-]+)\.md\)", r"([\1](../\1.md))", said[2])
    for (_, name), text in list(found.items()):
        found.setdefault(("[[phases]]", name), text)
    for name in ("lr", "momentum"):
        found["[[phases]]", f"outer_{name}"] = found["[outer]", name]
    return found


def write_events() -> str:
    text = ast.get_docstring(read("telemetry/events.py")) or ""
    before, _, rest = text.partition("| kind |")
    table, _, after = f"| kind |{rest}".partition("\n\n")
    joined = re.sub(r"\n(?!\|)", " ", table)
    return f"# Events\n\n`events.jsonl` of a run's folder. {before.strip()}\n\n{joined}\n\n{after.strip()}\n"


def find_metrics() -> Iterator[tuple[str, str, str]]:
    """Name, label and text, as they are in the source of /metrics."""

    def words(nodes: list[ast.expr]) -> list[str]:
        return [str(node.value) for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]

    for node in ast.walk(read("observe/dashboard/metrics.py")):
        if isinstance(node, ast.Tuple) and len(node.elts) == 3 and len(found := words(node.elts[:2])) == 2:
            yield f"atoll_{found[0]}", "", found[1]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found, labels = words(list(node.args)), [k.value for k in node.keywords if k.arg == "labels"]
            if node.func.id == "_labelled" and len(found) == 3:
                yield f"atoll_{found[0]}", found[2], found[1]
            elif node.func.id == "each" and len(found) == 2:
                yield f"atoll_learner_{found[0]}", "learner", found[1]
            elif node.func.id == "CounterMetricFamily":
                yield f"{found[0]}_total", "", found[1]
            elif node.func.id == "GaugeMetricFamily" and labels and isinstance(labels[0], ast.List) and len(found) == 2:
                yield found[0], ", ".join(words(labels[0].elts)), found[1]


def write_metrics() -> str:
    rows = "\n".join(f"| `{name}` | {label} | {text} |" for name, label, text in sorted(find_metrics()))
    return (
        "# Metrics\n\nWhat `/metrics` of a syncer has for Prometheus ([how to scrape it](../dashboard.md#metrics)). "
        "Figures that are not known yet are left out.\n\n| metric | labels | meaning |\n| --- | --- | --- |\n"
        + rows
        + "\n"
    )


def write_codes() -> str:
    own = [kind for kind in AtollError.__subclasses__() if kind.__module__ == AtollError.__module__]
    kinds = sorted(own, key=lambda kind: (kind.exit_code, kind.__name__))
    tree = ast.get_docstring(read("protocol/errors.py")) or ""
    said = dict(re.findall(r"[├└]── (\w+) +(.+)", tree))
    rows = "\n".join(f"| `{kind.__name__}` | {kind.exit_code} | {said[kind.__name__]} |" for kind in kinds)
    return f"""# Exit codes

| code | means |
| --- | --- |
| 0 | it ended well; also after one Ctrl-C, which ends a run in good order |
| 1 | it failed: the last line says why |
| 2 | the request cannot be fulfilled: one line names the reason and the fix. A restart does not mend it |
| 4 | a disk failed, or bytes on it have changed; or a syncer ended because its bucket says that the run went on elsewhere |
| 5 | a syncer ended because another has taken the run over. Do not start it again: it would be refused while the other serves |
| 130 | interrupted twice: everything was killed. A learner by hand: interrupted before it had joined |
| 141 | the program that read the output went away |
| 143 | SIGTERM ended a learner that had not joined yet; or a learner in a container left after it, in good order (`examples/deploy`) |

Which mistake in a script leads to which: [settings](../settings.md#exit-codes). What is raised for a reason:

| error | code | when |
| --- | --- | --- |
{rows}
"""


def find_variables() -> set[str]:
    text = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    return set(re.findall(r"ATOLL_[A-Z_]*[A-Z]", text))


def write_variables() -> str:
    rows = "\n".join(f"| `{name}` | {text} |" for name, text in VARIABLES.items())
    internal = ", ".join(f"`{name}`" for name in sorted(INTERNAL))
    return f"""# Environment variables

| variable | meaning |
| --- | --- |
{rows}

What our own processes tell each other, and nobody sets by hand: {internal}.
Of others Atoll reads: `CUDA_VISIBLE_DEVICES` (dealt out to learners), `OMP_NUM_THREADS` (set for them), `HTTPS_PROXY` and `NO_PROXY`, `SLURM_…` and `JOB_COMPLETION_INDEX` (names of learners), `NO_COLOR`,
and the credentials of [buckets](../stores.md#credentials-and-rights).
"""


def write_glossary() -> str:
    page = (ROOT / "docs" / "protocol.md").read_text()
    table = page.partition("## Words\n")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    turned = re.sub(r"\]\(#", "](../protocol.md#", "\n".join(sorted(rows, key=str.lower)))
    turned = re.sub(r"\]\((?!\.\./)", "](../", turned)
    return f"# Glossary\n\nThe words of the [protocol](../protocol.md), in order.\n\n| word | meaning |\n| --- | --- |\n{turned}\n"


WRITERS = {
    "api.md": write_api,
    "commands.md": write_commands,
    "settings.md": write_settings,
    "events.md": write_events,
    "metrics.md": write_metrics,
    "exit-codes.md": write_codes,
    "variables.md": write_variables,
    "glossary.md": write_glossary,
}


def pages() -> dict[str, str]:
    return {name: f"{MADE}\n{textwrap.dedent(writer())}" for name, writer in WRITERS.items()}


def stale() -> list[str]:
    """Pages that are not what the code says."""
    return [name for name, text in pages().items() if not (PAGES / name).exists() or (PAGES / name).read_text() != text]


def main() -> int:
    found = stale()
    if "--write" in sys.argv[1:]:
        PAGES.mkdir(exist_ok=True)
        made = pages()
        for name in found:
            (PAGES / name).write_text(made[name])
    for name in found:
        print(f"docs/reference/{name}")
    return 1 if found and "--write" not in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
