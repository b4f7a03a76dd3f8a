"""A run's settings: TOML into small frozen structs, with good defaults for everything.

seed, init   chance; pretrained weights to begin with; script, ranks: what learners run, in how many processes
[protocol]   the rules: protocol.settings.Settings
[outer]      merge and outer optimizer
[service]    where the syncer listens, how often the model is scored
[[scavenge]] plans of hours: so many learners more from one time of day to another
[workload]   what the built-in GPT trains; a script may read keys of its own from it

On a command line every setting is a word `key=value`: `atoll train --set quorum=2`, `atoll set RUN quorum=2`. Keys are
those of the file; of [outer], lr, momentum and optimizer are written outer_lr, outer_momentum and outer_optimizer; what
belongs to [workload] is written workload.key. A list has commas.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Sequence
from datetime import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_origin

import msgspec
import tomli_w

from atoll.choices import ADOPT, CODEC, MERGE, OUTER_OPTIMIZER, PLAN, QUORUM_POLICY, VERSION_CODEC
from atoll.protocol.errors import ConfigError
from atoll.protocol.limits import MAX_COUNTER
from atoll.protocol.messages import MOST_RANKS, MOST_SHARDS
from atoll.protocol.phases import TrainingPhase
from atoll.protocol.settings import Settings

if TYPE_CHECKING:
    from atoll.numerics.outer import OuterOptimizer

T = TypeVar("T", bound=msgspec.Struct)
TAIL_CUTS = 3
"""With `tail_average`, outer gradients are kept back to this cut: the last is taken at the end, perhaps right behind
the one before it."""


class Outer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How contributions become the next version."""

    merge: str = "rda-row"
    """Embeddings are merged by the mean, but under `rda-row-embeddings`."""
    optimizer: str = "nesterov"
    """The outer optimizer, which moves the model by the merged contributions: `atoll set --help` lists them."""
    lr: float = 0.6
    """η, the outer learning rate. docs/LOG.md has the runs behind this and the next."""
    momentum: float = 0.6
    """μ, the outer momentum."""
    norm_limit: float = 10.0
    """A contribution whose norm per step is this many times the running median is refused."""
    robust: bool = False
    """What points against the others, or is far larger, is shortened or left out before the merge; suspects whole."""

    def __post_init__(self) -> None:
        MERGE.check(self.merge)
        OUTER_OPTIMIZER.check(self.optimizer)
        if not 0 < self.lr < float("inf"):
            raise ConfigError(f"outer learning rate {self.lr} must be a number above 0, such as 0.7")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"outer momentum {self.momentum} must be at least 0 and below 1, such as 0.5")
        if not 1 < self.norm_limit < MAX_COUNTER:
            raise ConfigError(f"norm_limit = {self.norm_limit} must be above 1: it is a multiple of the usual norm")
        if not self.lr < MAX_COUNTER:
            raise ConfigError(
                f"lr = {self.lr} of the outer optimizer is so large that every step overflows: 0.6 is the default"
            )

    def make(self) -> OuterOptimizer:
        from atoll.numerics.outer import make_outer  # brings NumPy, which `atoll --help` does without

        return make_outer(self.optimizer, self.lr, self.momentum)


class Service(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free one."""
    keys: str = ""
    """The folder of certificate and tokens (`atoll cert`). Empty: this machine alone, and nobody is asked."""
    advertise: tuple[str, ...] = ()
    """HOST or HOST:PORT under which learners find it, for the join link; empty: as this machine knows itself."""
    mutual: bool = False
    """Learners must bring a certificate of the keys' own authority."""
    front: str = ""
    """The certificate of a proxy in front that ends TLS. Empty: none; else this port is in the clear, on loopback."""
    durability: Literal["round", "cut", "store"] = "round"
    """round: every round is on disk before it is told. cut: the disk is only waited for at cuts, so that a crash of the
    whole machine (not of a process) may cost the rounds since the last one. store: it is in the bucket of `store` too,
    so that the loss of the disk costs nothing."""
    store: str = ""
    """A bucket, as s3://bucket/run, that the run's folder is copied to as it goes. Empty: none."""
    share_files: bool = False
    """Other users of this machine may read the run's folder, as the umask allows. Its secrets stay private."""
    round_memory_mib: int = 16384
    """Memory that contributions to rounds under way may take in the syncer. It limits how many rounds are under way,
    down to those that `overlap` asks for."""
    evaluate_every: int = 100
    """Rounds between two scores of the global model; in a phase with another H, those of the same learner steps. 0: it
    is not scored."""
    shards: int = 1
    """Processes that are the syncer together: each holds a part of every fragment (docs/adr/0031)."""
    tail_average: int = 0
    """At the end of the run, the mean of the last so many versions of every fragment is written too. 0: it is not."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port = {self.port} is not between 0 and 65535; 0 takes any free one")
        if self.round_memory_mib < 0:
            raise ConfigError(f"round_memory_mib = {self.round_memory_mib} is below 0: 0 allows what τ asks for")
        if not 1 <= self.shards <= MOST_SHARDS:
            raise ConfigError(f"shards = {self.shards}: a syncer has 1 to {MOST_SHARDS} of them")
        if self.durability == "store" and not self.store:
            raise ConfigError('durability = "store" needs a bucket: name it by --store s3://bucket/run')
        if self.tail_average < 0 or self.tail_average == 1:
            raise ConfigError(f"tail_average = {self.tail_average} averages nothing: 0 leaves it, 2 is the least")
        if self.evaluate_every < 0:
            raise ConfigError(f"evaluate_every = {self.evaluate_every} is below 0; 0 leaves the model unscored")


class ScavengePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """So many learners more between two times of day, each day, by the clock of the run's controller."""

    from_: str = msgspec.field(name="from")
    """As in 22:00 …"""
    to: str
    """… and 06:00: what ends before it begins goes over midnight."""
    learners: int
    """How many more than otherwise."""

    def __post_init__(self) -> None:
        if self.begins == self.ends:
            raise ConfigError(f"[[scavenge]] from {self.from_} to {self.to} is no time at all: name two times of day")
        if self.learners < 1:
            raise ConfigError(f"[[scavenge]] learners = {self.learners}: a plan adds at least 1")

    @property
    def begins(self) -> time:
        return _time_of_day(self.from_)

    @property
    def ends(self) -> time:
        return _time_of_day(self.to)


def _time_of_day(text: str) -> time:
    if re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", text) is None:
        raise ConfigError(f"[[scavenge]] {text!r} is no time of day: write it as 22:00")
    return time.fromisoformat(text)


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    seed: int = 0
    """Of the order of leased samples, and of what `atoll train` starts (`ATOLL_SEED`, `learner.seed`)."""
    init: str = ""
    """Pretrained weights to begin with: a safetensors file. Empty: the first learner's own."""
    script: tuple[str, ...] = ()
    """What every learner runs, for `--resume`; empty: the built-in workload."""
    ranks: int = 1
    """Processes of every learner that `atoll train` starts: together they are one learner of the run."""
    algorithm: Literal["decoupled", "data-parallel"] = "decoupled"
    """What `--algorithm` named. In a data-parallel run the ranks are what it has for learners."""
    strict_devices: bool = False
    """`atoll train` refuses more learners than there are GPUs."""
    learner_nice: int = 9
    """The niceness of a learner that trains, and of the evaluator, as `atoll train` starts them: syncer, couriers and
    starting learners go first. 0: the operating system deals the processor out."""
    cpus_per_learner: float = 1.0
    """Of a node of a Ray cluster, for every learner …"""
    gpus_per_learner: float = 0.0
    """… and GPUs; with several ranks, those of all of them."""
    nodes_per_learner: int = 1
    """Of a Ray cluster: the ranks, CPUs and GPUs of a learner are spread evenly over so many."""
    by_hand: bool = False
    """Learners are started by hand (`atoll syncer`): their script is known to nobody here."""
    scavenge: tuple[ScavengePlan, ...] = ()
    """When there are more learners, and how many."""
    protocol: Settings = Settings()
    outer: Outer = Outer()
    service: Service = Service()
    workload: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed = {self.seed} is below 0: take any whole number from 0")
        if not 1 <= self.ranks <= MOST_RANKS:
            raise ConfigError(f"ranks = {self.ranks}: a learner has 1 to {MOST_RANKS} of them")
        if not 0 <= self.learner_nice <= 19:
            raise ConfigError(f"learner_nice = {self.learner_nice} is not from 0 (goes first) to 19")
        for name in ("cpus_per_learner", "gpus_per_learner"):
            if not 0 <= getattr(self, name) < MAX_COUNTER:
                raise ConfigError(f"{name} = {getattr(self, name)} is below 0: it is what a learner takes of a node")
        if self.nodes_per_learner < 1 or self.ranks % self.nodes_per_learner:
            raise ConfigError(
                f"nodes_per_learner = {self.nodes_per_learner}: ranks = {self.ranks} cannot be spread evenly over them"
            )
        CODEC.check(self.protocol.codec)
        PLAN.check(self.protocol.plan)
        ADOPT.check(self.protocol.resolved_adopt)
        QUORUM_POLICY.check(self.protocol.quorum_policy)
        VERSION_CODEC.check(self.protocol.version_codec)
        if self.service.tail_average and self.protocol.keep_cuts < TAIL_CUTS:
            raise ConfigError(
                f"tail_average needs the outer gradients behind the last {TAIL_CUTS} cuts: "
                f"keep_cuts = {self.protocol.keep_cuts} is too few"
            )
        if self.protocol.phases and self.protocol.warm_start:
            raise ConfigError("warm_start is a phase of its own: leave it out, or leave [[phases]] out")
        check_phases(self.protocol.phases)
        if self.protocol.version_codec != Settings().version_codec:
            from atoll.numerics.updates import check_version_codec  # brings NumPy, as above

            check_version_codec(self.protocol.version_codec, self.outer.optimizer)
        check_sharded(self.service.shards, self.outer, self.protocol)

    @property
    def data_parallel(self) -> int:
        """Number of processes of a data-parallel run; 0: it is none."""
        return self.ranks if self.algorithm == "data-parallel" else 0

    def toml(self) -> bytes:
        document = msgspec.to_builtins(self)
        return tomli_w.dumps(_without_none(document)).encode()


def check_sharded(shards: int, outer: Outer, protocol: Settings) -> None:
    """ConfigError: something needs whole tensors at once, which no shard of several has."""
    if shards == 1:
        return
    from atoll.numerics.merge import merges_in_parts, merges_rows_apart  # brings NumPy, as above

    rules = {outer.merge, *(phase.merge for phase in protocol.phases if phase.merge is not None)}
    whole = next((rule for rule in sorted(rules) if not merges_in_parts(rule)), "")
    by_norms = next((rule for rule in sorted(rules) if not merges_rows_apart(rule)), "")
    refused = [
        (f'merge = "{whole}"', bool(whole)),
        (f'robust with merge = "{by_norms}"', outer.robust and bool(by_norms)),
        ('share = "moments"', protocol.shares_moments),
        ('guard = "rollback"', protocol.guard == "rollback"),
    ]
    for name, given in refused:
        if given:
            raise ConfigError(f"{name} is for a syncer of one process, and shards = {shards}: leave one of them out")


def parse_shard(word: str) -> tuple[int, int]:
    """Which shard of how many: 2/3."""
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", word)
    shard, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= shard <= count <= MOST_SHARDS:
        raise ConfigError(f"--shard {word} is not understood: write it as 2/3, the second of three")
    return shard, count


def check_phases(phases: Sequence[TrainingPhase]) -> None:
    """ConfigError: one names an adoption or a merge that is not known."""
    for phase in phases:
        for choice, name in ((ADOPT, phase.adopt), (MERGE, phase.merge)):
            if name is not None:
                choice.check(name)


def parse(text: str, origin: str) -> Config:
    try:
        return convert(tomllib.loads(text), origin)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{origin} is not TOML: {error}") from error


def convert(document: dict[str, Any], origin: str) -> Config:
    return converted(_move_phases(document), Config, origin)


def _move_phases(document: dict[str, Any]) -> dict[str, Any]:
    """To [protocol], where they stand at the top: `[[phases]]` are of the protocol and of the outer step."""
    protocol = document.get("protocol", {})
    if "phases" not in document or not isinstance(protocol, dict):
        return document
    if "phases" in protocol:
        raise ConfigError("phases stand at the top and in [protocol]: leave one of them out")
    rest = {key: value for key, value in document.items() if key != "phases"}
    return {**rest, "protocol": {**protocol, "phases": document["phases"]}}


def converted(document: dict[str, Any], kind: type[T], origin: str) -> T:
    """The document as such a struct; ConfigError names the key and what is wrong with it."""
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {_explain(str(error), kind)}") from error


def load(path: Path) -> Config:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return parse(text, str(path))


def merged(document: dict[str, Any], changes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The document with what the command line said on top, by table ("" is the top); None says nothing."""
    moved = _move_phases(document)
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in moved.items()}
    for table, values in changes.items():
        said = {key: value for key, value in values.items() if value is not None}
        place = result.setdefault(table, {}) if table and said else result
        if isinstance(place, dict):  # what is no table is refused later, by its name
            nested = {key: {**place[key], **value} for key, value in said.items() if key in place and key in NESTED}
            place.update(said | nested)
    return result


# ---- settings as words ----------------------------------------------------------------------------------------------


PREFIXED = ("lr", "momentum", "optimizer")
"""Of [outer]: alone these words mean the learner's own optimizer."""
WORKLOAD, ONE_WEIGHT = "workload.", "weight_limit."
NESTED = ("weight_limits",)
NO_WORDS = ("script", "algorithm", "by_hand", "scavenge", "protocol", "outer", "service", "workload")
"""Of a run's settings: what no word sets."""

Changes = dict[str, dict[str, Any]]
"""Values by table ("" is the top) and key."""


class SettingPlace(NamedTuple):
    table: str
    field: str
    kind: Any


def known_settings(workload: type[msgspec.Struct] | None = None) -> dict[str, SettingPlace]:
    """Every setting by the key of its word. `workload`: what the [workload] table is, where that is known."""
    tables: list[tuple[str, type[msgspec.Struct]]] = [
        ("", Config),
        ("protocol", Settings),
        ("outer", Outer),
        ("service", Service),
    ]
    if workload is not None:
        tables.append(("workload", workload))
    found: dict[str, SettingPlace] = {}
    for table, struct in tables:
        for field in msgspec.structs.fields(struct):
            if field.name not in (*NESTED, *(NO_WORDS if not table else ())):
                found.setdefault(_key(table, field.name), SettingPlace(table, field.name, field.type))
    return found


NO_STORE = "store=none"
"""The word that takes a run's bucket from it."""


def parse_settings(words: Sequence[str], workload: type[msgspec.Struct] | None = None) -> Changes:
    """`["quorum=2", "outer_lr=0.5"]` by table; of two words for one setting the last counts.

    ConfigError names the word and the fix."""
    known = known_settings(workload)
    changes: Changes = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not text:
            raise ConfigError(f"{word!r} is not understood: write it as quorum=2")
        if key.startswith(ONE_WEIGHT) and key != ONE_WEIGHT:
            limits = changes.setdefault("protocol", {}).setdefault("weight_limits", {})
            limits[key.removeprefix(ONE_WEIGHT)] = _convert_word(word, text, float)
        elif key in known:
            place = known[key]
            value = "" if word == NO_STORE else _convert_word(word, text, place.kind)
            changes.setdefault(place.table, {})[place.field] = value
        elif workload is None and key.startswith(WORKLOAD) and key != WORKLOAD:
            changes.setdefault("workload", {})[key.removeprefix(WORKLOAD)] = _read_value(text)
        else:
            raise ConfigError(f"there is no setting {key!r}: {_nearest(key, known)}")
    if changes.get("protocol", {}).get("synchronous"):  # learners wait for the round, so nothing overlaps it
        changes["protocol"].setdefault("overlap", 0)
    return changes


def _key(table: str, field: str) -> str:
    if table == "workload":
        return f"{WORKLOAD}{field}"
    return f"outer_{field}" if table == "outer" and field in PREFIXED else field


def _convert_word(word: str, text: str, kind: Any) -> Any:
    """What is written as in TOML begins with a bracket: phases=[{until = 0.15, sync_every = 3}]."""
    value = text.split(",") if get_origin(kind) is tuple else _read_value(text) if text[0] == "[" else text
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        problem = str(error).partition(" - at ")[0].replace("`", "")
        raise ConfigError(f"{word}: {problem[:1].lower()}{problem[1:]}") from error


def _read_value(text: str) -> Any:
    """Of a script's own setting: as TOML has it, or a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _nearest(key: str, known: Iterable[str]) -> str:
    """Name the three settings whose names are nearest."""
    names = list(known)
    same = [name for name in names if name.removeprefix(WORKLOAD) == key]
    *others, last = same or difflib.get_close_matches(key, names, n=3, cutoff=0.0)
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?"


def _explain(error: str, kind: type[msgspec.Struct]) -> str:
    """The place as a person would write it; an unknown key with the nearest known ones beside it."""
    problem, _, place = error.partition(" - at ")
    *tables, last = place.strip("`$.").split(".")
    found = re.search(r"unknown field `([^`]+)`", problem)
    if found is None:
        table = f"[{'.'.join(tables)}] " if tables else ""
        return f"{table}{last}: {problem[:1].lower()}{problem[1:].replace('`', '')}" if last else problem
    key, table = found.group(1), last
    table = "phases" if table.startswith("phases[") else table
    structs = {"protocol": Settings, "outer": Outer, "service": Service, "phases": TrainingPhase}
    known = list(structs.get(table, kind).__struct_fields__)
    where = f"[{table}] " if table else ""
    return f"unknown key {where}'{key}': {_nearest(key, known)}"


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list | tuple) else value
