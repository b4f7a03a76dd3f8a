"""`atoll restore` and `atoll upload`: a run from its bucket, and the rest of one to it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from atoll.bucket.claims import check_own, is_copy, read_place, refuse_copy
from atoll.bucket.client import open_bucket
from atoll.bucket.journal_copy import JournalMark
from atoll.bucket.layout import payload_place
from atoll.bucket.uploader import make_shard_uploader, make_uploader
from atoll.cli.shared import short
from atoll.config import Config, load
from atoll.launch.restoring import restore_run
from atoll.launch.resume import name_command
from atoll.protocol.errors import AtollError, ConfigError, RunFailed
from atoll.store.cuts import BadCut, CutState, complete_cuts, known_cuts, read_state
from atoll.store.disk import LocalDisk
from atoll.store.head import read_head
from atoll.store.journal import seal
from atoll.store.keys import KeyDir
from atoll.store.rundir import RunDir
from atoll.store.segments import Position
from atoll.store.shards import ShardCut
from atoll.store.writer_lease import check_not_alive, newest_claim

PATIENCE_S = 60.0
"""How long the end of a run is tried to be uploaded without success."""


def restore(*, url: str, out: Path, take_over: bool, read_only: bool, accept_loss: bool) -> None:
    if take_over and read_only:
        raise ConfigError("--take-over claims the run and --read-only does not: leave one of them out")
    console = Console()
    _restore(url, out, console, take_over=take_over, read_only=read_only, accept_loss=accept_loss)
    go_on = "" if read_only else _describe_next(out.absolute())
    console.print(f"{url} is in {short(out.absolute())}{go_on}", soft_wrap=True, markup=False)


def _describe_next(out: Path) -> str:
    """Return the command that goes on with a run that was brought back, by who started its learners."""
    config = load(out / "run.toml")
    command = f"{name_command(RunDir(out))} --resume {short(out)}"
    if not config.by_hand or not config.service.keys:
        return f"; go on with: {command}"
    keys = Path(config.service.keys)
    if config.service.port:
        command = f"{command} --port {config.service.port}"  # learners' links name it
    if KeyDir(keys).is_complete:
        return f"; go on with: {command} --keys {short(keys)}"
    lacks = f"{keys} is not on this machine, and new keys would lock out every learner"
    return f"; go on with: {command} --keys DIR, a copy of the run's keys: {lacks}"


def restore_if_empty(out: Path, url: str, console: Console, *, accept_loss: bool = False) -> None:
    """For `--resume DIR --store URL` on a disk that has nothing of the run."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        _restore(url, out, console, accept_loss=accept_loss)


def _restore(
    url: str,
    out: Path,
    console: Console,
    *,
    take_over: bool = False,
    read_only: bool = False,
    accept_loss: bool = False,
) -> None:
    with console.status(f"fetching {url}") as status:
        found = restore_run(
            url,
            out,
            take_over=take_over,
            read_only=read_only,
            accept_loss=accept_loss,
            tell=lambda text: status.update(f"fetching {url}: {text}"),
        )
    for remark in found.remarks:
        console.print(remark, soft_wrap=True, highlight=False, markup=False)


@contextmanager
def open_copy(run: Path | str, console: Console) -> Iterator[Path]:
    """The folder of a run; of one that is named by its bucket, a copy that is gone afterwards."""
    if isinstance(run, Path):
        yield run
        return
    with tempfile.TemporaryDirectory(prefix="atoll-copy-") as folder:
        out = Path(folder) / "run"
        _restore(run, out, console, read_only=True)
        yield out


def upload(*, run: Path) -> None:
    out = RunDir.open(run)
    check_not_alive(out.path)
    place = read_place(out.path)
    if place is None:
        raise ConfigError(
            f"{short(out.path)} has no bucket: name one with {name_command(out)} --resume {short(run)} --store URL"
        )
    bucket = open_bucket(place.url)
    check_own(bucket, out, place)
    if is_copy(out.path, place):
        raise refuse_copy(bucket, out.path)
    console = Console()
    if wrong := finish_upload(out, console):
        raise RunFailed(wrong)
    console.print(f"all of {short(out.path)} is in {place.url}", soft_wrap=True, highlight=False, markup=False)


def describe_disk_loss(config: Config) -> str:
    """Return what the loss of this disk would cost the run, for its operator to know before that happens."""
    if not config.service.store:
        return "no --store: should this disk be lost, the run is lost with it"
    if config.service.durability == "store":
        return "durability = store: should this disk be lost, nothing that was told is lost"
    return (
        f"durability = {config.service.durability}: should this disk be lost, the rounds that are not in the bucket "
        "yet are lost (about a second's), and a new run goes on from the last one there, with the same learners; "
        "with --set durability=store nothing is lost, and every round waits for the bucket"
    )


def finish_unseen(out: RunDir) -> str:
    """The same where nobody looks: in a controller (launch/on_ray)."""
    wrong = finish_upload(out, Console(quiet=True))
    return _describe_missing(out, wrong) if wrong else ""


def _describe_missing(out: RunDir, wrong: str) -> str:
    url, again = load(out.settings).service.store, f"what is missing is sent by: atoll upload {short(out.path)}"
    return f"the end of the run is not in {url}: {wrong}; {again}"


def finish_upload(out: RunDir, console: Console) -> str:
    """Upload what is left of a run that is over, and release it. What is wrong; empty: all of it is there, or the run
    has no bucket. A run does not fail because of it."""
    url = load(out.settings).service.store if out.settings.exists() else ""
    if not url:
        return ""
    try:
        with console.status(f"uploading the end of the run to {url}") as status:
            wrong = _finish_all(out, url, lambda text: status.update(f"{text}; trying again"))
    except AtollError as error:
        wrong = str(error)
    except KeyboardInterrupt:
        wrong = "interrupted"
    if wrong:
        text = _describe_missing(out, wrong)
        console.print(text, style="bold yellow", soft_wrap=True, highlight=False, markup=False)
    return wrong


def _finish_all(out: RunDir, url: str, tell: Callable[[str], None]) -> str:
    """The other shards first: with the lead's the run is released."""
    config = load(out.settings)
    head = read_head(out)
    rounds, shards = head.committed if head is not None else 0, config.service.shards
    newest = next(iter(complete_cuts(out.cuts)), -1)
    for number in range(2, shards + 1):
        folder = out.shard(number)
        if not folder.journal.is_dir():
            raise ConfigError(f"{short(folder.path)} is missing: it holds shard {number} of the run")
        shard = make_shard_uploader(folder, url, number, newest_claim(folder.journal), told_after_put=False)
        if wrong := shard.finish_with(newest, find_end(folder, ShardCut, rounds), PATIENCE_S, tell):
            return wrong
    keep, term = config.protocol.keep_cuts, newest_claim(out.journal)
    lead = make_uploader(out, url, term, keep=keep, told_after_put=False, shards=shards)
    return lead.finish(find_end(out, CutState, rounds), PATIENCE_S, tell)


def find_end(out: RunDir, kind: type[CutState] | type[ShardCut], rounds: int) -> JournalMark:
    """Where the journal of a run that nobody writes ends, or the chain of a shard."""
    start: Position | None = None
    for number in known_cuts(out.cuts):
        try:
            _, state = read_state(out.cuts, number, kind)
            start = state.position
            break
        except BadCut:
            continue
    end = seal(out.journal, start=start, disk=LocalDisk())
    files = [payload_place(path.stem) for path in out.journal.glob("payload-*.bin")]
    after = max((place[1] for place in files if place is not None and place[0] == end.term), default=0) + 1
    return JournalMark(end.term, end.offset, after, 0, rounds, time.monotonic())
