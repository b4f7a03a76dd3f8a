"""`atoll syncer` and `atoll learn`: the parts of a run, started by hand."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from rich.console import Console

from atoll.cli.advertised import Place, complete_ports, find_own_hosts, find_place, known_hosts, name_hosts
from atoll.cli.keys import Last, join_link, remember
from atoll.cli.linked_pins import LinkedPins
from atoll.cli.shared import (
    check_store,
    close,
    compile_kernels,
    document_of,
    setting_words,
    settings_of,
    short,
    without_own_shards,
)
from atoll.cli.store import describe_disk_loss, finish_upload, restore_if_empty
from atoll.config import Config, Service, convert, merged, parse_settings, parse_shard
from atoll.fabric.address import SCHEME, SyncerAddress, check_bind, parse_address
from atoll.fabric.certificates import signs_itself
from atoll.fabric.listener import check_port
from atoll.launch.begun_here import check_begun_here, remember_run
from atoll.launch.environment import read_environment
from atoll.launch.local import RUNNER, script_arguments
from atoll.launch.losses import accept_lost_chain
from atoll.launch.restoring import attach_store
from atoll.launch.resume import plan_resume
from atoll.observe import dashboard
from atoll.observe.tail import Comings
from atoll.protocol.errors import ConfigError
from atoll.store.atomic import write_atomic
from atoll.store.head import read_head
from atoll.store.keys import KeyDir, read_link
from atoll.store.rundir import RunDir, checked_name
from atoll.store.writer_lease import check_not_alive, hold_run, served, syncer_holding
from atoll.syncer.changes import check_changeable
from atoll.syncer.credentials import make_port_access, read_tokens
from atoll.syncer.process import serve
from atoll.syncer.shard_process import serve_shard
from atoll.telemetry.status import RunStatus

PORT = 7077
NO_RULES = ("store", "durability")
"""What `--resume` takes and the journal does not record."""


def syncer(
    *,
    out: Path | None,
    force: bool,
    resume: Path | None,
    store: str | None,
    standby: Path | None,
    shard: str | None,
    join: str | None,
    learners: int | None,
    steps: int | None,
    tokens: int | None,
    config: Path | None,
    words: list[str],
    warm_start: float | None,
    share: str | None,
    robust: bool,
    port: int | None,
    bind: str | None,
    keys: Path | None,
    advertise: list[str],
    mutual: bool,
    front: Path | None,
    trust: bool,
    accept_loss: bool,
) -> None:
    budget: dict[str, int | None] = {"learners": learners, "steps": steps, "tokens": tokens}
    number, count = parse_shard(shard) if shard is not None else (1, None)
    words = setting_words(words, **budget, shards=count, store=store, warm_start=warm_start, share=share, robust=robust)
    service = {
        "host": bind,
        "port": port,
        "keys": str(keys.absolute()) if keys is not None else None,
        "advertise": advertise or None,
        "mutual": mutual or None,
        "front": str(front.absolute()) if front is not None else None,
    }
    if number > 1 and count is not None:
        if resume is not None or standby is not None or config is not None or force or len(words) > 1:
            raise ConfigError(
                f"shard {number} is told the run's settings by the first: give --join, --out and where it listens "
                "(--port, --bind, --keys, --advertise, --front, --mutual), and nothing else"
            )
        port = PORT + number - 1 if port is None else port
        _serve_shard(number, count, join, out, {**service, "port": port}, accept_loss=accept_loss)
        return
    if resume is not None or standby is not None:
        if out is not None or config is not None or force or (resume is not None and standby is not None):
            raise ConfigError(
                "--resume and --standby name a run that lies there: give one of them, "
                "and leave --out, --config and --force out"
            )
        if resume is not None:
            if store is not None:
                restore_if_empty(resume, store, Console(), accept_loss=accept_loss)
            _resume(resume, service, without_own_shards(words, resume), trusted=trust, accept_loss=accept_loss)
        elif standby is not None:
            own = without_own_shards(words, standby)
            _stand_by(standby, {**service, "port": PORT if port is None else port}, own)
        return
    if port is None and "port" not in parse_settings(words).get("service", {}):
        service["port"] = PORT
    document = merged(settings_of(document_of(config), words, None), {"service": service})
    settings = convert(document, str(config or "the command line"))
    settings.protocol.check_budget()
    settings = msgspec.structs.replace(settings, by_hand=True)
    check_service(settings.service)
    check_port(settings.service.host, settings.service.port)
    _check_store(settings.service)
    run_dir = RunDir.create(out, force=force, shared=settings.service.share_files)
    if settings.service.store:
        attach_store(run_dir, settings.service.store)
    write_atomic(run_dir.settings, settings.toml())
    remember_run(settings, None)
    _serve(settings, run_dir)


def _check_store(service: Service) -> None:
    """Shards that were started by hand have folders anywhere, which nobody could bring back together."""
    if service.store and service.shards > 1:
        raise ConfigError(
            "--store with several shards is for atoll train --syncer-shards: leave --shard or --store out"
        )


def _serve_shard(
    number: int, count: int, join: str | None, out: Path | None, service: dict[str, Any], *, accept_loss: bool
) -> None:
    """A process of a syncer beside its first. Started again with the same folder, it goes on with what it holds."""
    if join is None or out is None:
        missing = "--join LINK, the join link of the first" if join is None else "--out DIR, a folder of its own"
        raise ConfigError(f"--shard {number}/{count} needs {missing}")
    settings = convert({"service": {key: value for key, value in service.items() if value is not None}}, "--shard")
    check_service(settings.service)
    check_port(settings.service.host, settings.service.port)
    lead = read_link(join, "--join (or ATOLL_JOIN)")
    parse_address(lead).context()  # what cannot be used is said now
    run_dir = RunDir.open_shard(out)
    if run_dir.summary.exists() or run_dir.learners.exists():
        raise ConfigError(f"{short(run_dir.path)} holds a run, and a shard has a folder of its own: choose another")
    console = Console()
    if accept_loss and (lost := accept_lost_chain(run_dir, number)):
        console.print(lost, soft_wrap=True, highlight=False, markup=False)
    compile_kernels(console)

    def ready(url: str) -> None:
        shown = url
        if settings.service.keys:
            shown = f"https://{name_hosts(settings.service, urlsplit(url).port or 0)[0][0]}"
        console.print(f"shard {number} of {count} at [bold]{shown}[/], in {short(run_dir.path)}", soft_wrap=True)

    def name_address(url: str) -> str:
        """As learners dial it: by the keys of the run, as with the first; without keys on this machine alone."""
        if not settings.service.keys:
            return url
        hosts, pin = name_hosts(settings.service, urlsplit(url).port or 0)
        return SyncerAddress(urls=tuple(f"https://{host}" for host in hosts), pin=pin).link()

    if code := serve_shard(settings.service, run_dir, lead, number, count, ready=ready, name_address=name_address):
        raise SystemExit(code)


def _resume(folder: Path, service: dict[str, Any], words: list[str], *, trusted: bool, accept_loss: bool) -> None:
    """Go on with a run that lies there: opened again where it had ended, with what the operator changes. It listens
    where it did, because learners, links and open dashboards know it by that address; what is given anew stays."""
    run_dir = RunDir.open(folder)
    if holder := syncer_holding(run_dir.journal):
        raise served(run_dir.journal, holder)
    rules = tuple(word for word in words if word.partition("=")[0] not in NO_RULES)
    check_changeable(rules)
    check_not_alive(run_dir.path)
    check_begun_here(run_dir, trusted=trusted, runs_script=False)
    found = plan_resume(run_dir, rules, accept_loss=accept_loss)
    document = merged(document_of(run_dir.settings), parse_settings(words))
    asked = settings = convert(merged(document, {"service": service}), str(run_dir.settings))
    if service["port"] is None:
        own = msgspec.structs.replace(asked.service, port=_own_port(run_dir, asked.service))
        settings = msgspec.structs.replace(asked, service=own)
    check_service(settings.service, goes_on=True)
    check_port(settings.service.host, settings.service.port)
    _check_store(settings.service)
    if settings.service.store:
        attach_store(run_dir, settings.service.store)
    with hold_run(run_dir.path):  # somebody may have gone on with it since it was looked at
        if words or any(value is not None for value in service.values()):
            write_atomic(run_dir.settings, asked.toml())
        remember_run(asked, read_environment(run_dir.path))
        run_dir.summary.unlink(missing_ok=True)  # of an earlier end
    for remark in found.remarks:
        Console().print(remark, soft_wrap=True, highlight=False, markup=False)
    _serve(settings, run_dir, found.changes, reopen=found.reopen, goes_on=service["advertise"] is None)


def _own_port(run_dir: RunDir, service: Service) -> int:
    """The one that the run was given; where that was any, the one it had last."""
    return service.port or run_dir.find_last_port() or PORT


def _stand_by(folder: Path, service: dict[str, Any], words: list[str]) -> None:
    """Serve a run when the syncer that serves it now is gone or stands still."""
    if words:
        raise ConfigError(f"{words[0]} does not go with --standby: change a run that goes on with `atoll set`")
    run_dir = RunDir.open(folder)
    document = document_of(run_dir.settings)
    settings = convert(merged(document, {"service": service}), str(run_dir.settings))
    if (served_port := document.get("service", {}).get("port")) and service["advertise"] is None:
        settings = msgspec.structs.replace(settings, service=complete_ports(settings.service, served_port))
    check_service(settings.service, goes_on=True)
    if not syncer_holding(run_dir.journal) and (head := read_head(run_dir)) is not None and head.finished:
        raise ConfigError(
            f"the run in {run_dir.path} is over ({head.ended}), so there is nothing to stand by for: "
            f"go on with it by atoll syncer --resume {short(run_dir.path)}"
        )
    if foreign := LinkedPins(run_dir, settings.service).describe_foreign():
        raise ConfigError(
            f"{foreign}: every learner would be locked out. Copy the keys of the run to this machine, and name them "
            "with --keys DIR"
        )
    _serve(settings, run_dir, stands_by=True, goes_on=service["advertise"] is None)


def _serve(
    settings: Config,
    run_dir: RunDir,
    changes: tuple[str, ...] = (),
    *,
    reopen: bool = False,
    stands_by: bool = False,
    goes_on: bool = False,
) -> None:
    """`goes_on`: learners hold links of an earlier syncer of the run."""
    console, service = Console(), settings.service
    compile_kernels(console, "; then it stands by" if stands_by else "")
    comings = Comings(run_dir.events, console, takes_over=stands_by)
    pins = LinkedPins(run_dir, service)

    def list_hosts(port: int) -> tuple[str, ...]:
        return known_hosts(service, port) if goes_on else name_hosts(service, port)[0]

    # Names are resolved before anything is served: the event loop must not wait for a resolver.
    own_hosts = find_own_hosts(list_hosts(1)) if service.keys else frozenset[str]()

    def find(port: int) -> Place:
        return find_place(service, port, list_hosts(port), own_hosts, goes_on=goes_on)

    def say_remark(place: Place) -> None:
        if place.remark:
            style = "bold yellow" if place.warns else None
            console.print(place.remark, style=style, soft_wrap=True, highlight=False, markup=False)

    def wait() -> None:
        console.print(f"standing by for the run in {short(run_dir.path)}", soft_wrap=True)
        if service.keys and service.port:
            say_remark(find(service.port))

    def ready(url: str, run: str, look: str) -> None:
        place = find(urlsplit(url).port or 0) if service.keys else Place()
        shown = f"https://{place.shown}" if place.shown else url
        console.print(f"syncer at [bold]{shown}[/], run {run} in {short(run_dir.path)}", soft_wrap=True)
        say_remark(place)
        if foreign := pins.describe_foreign():
            locked = f"{foreign}: no learner that has one can join. End this syncer and go on with a copy of the run's "
            remark = f"{locked}keys (--keys DIR), or hand out new links"
            console.print(remark, style="bold yellow", soft_wrap=True, highlight=False, markup=False)
        pins.note()
        console.print(f"dashboard: {shown}{look.removeprefix(url)}", soft_wrap=True, highlight=False)
        own = invitation(service, url, run, short(run_dir.path), on_terminal=sys.stdout.isatty())
        for line in (describe_disk_loss(settings), *invite_shards(service, url), *own):
            console.print(line, soft_wrap=True, highlight=False, markup=False)
        comings.start()

    def watch(status: RunStatus) -> None:
        comings.note_status(status)
        pins.note()  # certificates are renewed while a run goes on

    try:
        code = serve(
            settings,
            run_dir,
            evaluated=False,
            changes=changes,
            reopen=reopen,
            standby=wait if stands_by else None,
            ready=ready,
            pages=dashboard.pages,
            watch=watch,
        )
    finally:
        comings.stop()
    if code:
        raise SystemExit(code)
    close(run_dir, console, again="atoll syncer")
    finish_upload(run_dir, console)


def check_service(service: Service, *, goes_on: bool = False) -> None:
    """Before anything is made: who binds beyond this machine has TLS and tokens. `goes_on`: a run that has keys needs
    those, and no others."""
    check_store(service.store)
    check_bind(service.host, secured=bool(service.keys) and not service.front)
    if (service.mutual or service.front) and not service.keys:
        raise ConfigError("--mutual and --front go with --keys: make them with `atoll cert`")
    if goes_on and service.keys and not KeyDir(Path(service.keys)).is_complete:
        raise ConfigError(
            f"{service.keys} holds no keys: copy the keys of the run there, or name them with --keys DIR; "
            "new ones would lock out every learner"
        )
    if service.keys:
        name_hosts(service, 1)
        make_port_access(service, str)


def invite_shards(service: Service, url: str) -> list[str]:
    """How the other processes of a syncer of several are started; a learner's token does not let them in."""
    if service.shards == 1:
        return []
    others = "2" if service.shards == 2 else f"2 … {service.shards}"
    start = f"atoll syncer --shard 2/{service.shards} --out DIR --join"
    if not service.keys:
        return [f"nobody can join before shard {others} is there: {start} {url}"]
    make = f"atoll tokens --keys {short(Path(service.keys))} add shards --role operator"
    return [
        f"nobody can join before shard {others} is there: {start} LINK --keys DIR, with a copy of these keys",
        f"LINK is a secret, which this prints: {make}",
    ]


def invitation(service: Service, url: str, run: str, folder: Path, *, on_terminal: bool) -> list[str]:
    """How learners join. `on_terminal`: where it is not, it lands in a log, and the link is left out."""
    if not service.keys:
        return [
            f"join with: atoll learn SCRIPT --syncer {url}",
            f"or by plain Python: ATOLL_JOIN={url} python SCRIPT",
            f"score the model with: atoll learn SCRIPT --syncer {url} --evaluator",
            f"another user of this machine joins by a link: atoll tokens link --run {folder}",
        ]
    keys = KeyDir.open(Path(service.keys))
    hosts, pin = name_hosts(service, urlsplit(url).port or 0)
    last = Last(hosts, run, pin, service.front)
    remember(keys, last)
    tokens = read_tokens(keys)
    token, scorer = tokens.with_role("learner", time.time()), tokens.with_role("evaluator", time.time())
    if token is None:
        return ["nobody can join yet: atoll tokens add NAME makes a token and prints its link"]
    stays = "a link that ends with ca stays good when the certificate is renewed: atoll tokens link --ca"
    shown = join_link(last, scorer) if scorer is not None and on_terminal else ""
    return [
        *_invite_evaluator(shown, short(keys.path)),
        *([] if service.front or signs_itself(keys.certificate.read_bytes()) else [stays]),
        "the dashboard asks for any name, and for a token as the password (atoll tokens add NAME --role viewer)",
        *(
            [
                "join with (a secret: whoever has it can join):",
                f"  ATOLL_JOIN={(link := join_link(last, token))} python SCRIPT",
                f"  atoll learn SCRIPT --join {link}",
            ]
            if on_terminal
            else [
                "by plain Python, with that link in a file of mode 600: ATOLL_JOIN=FILE python SCRIPT",
                f"join with the link that this prints, a secret: atoll tokens --keys {short(keys.path)} link",
            ]
        ),
    ]


def _invite_evaluator(link: str, keys: Path) -> list[str]:
    """How an evaluator is started; `link`: the one that it joins by, where it has one and may be shown."""
    if link:
        return ["score the model with (a secret too):", f"  atoll learn SCRIPT --evaluator --join {link}"]
    make = f"atoll tokens --keys {keys} add scorer --role evaluator"
    return [f"score the model with: atoll learn SCRIPT --evaluator --join LINK, which this prints: {make}"]


def learn(
    *,
    arguments: list[str],
    script: Path,
    join: str | None,
    syncer: str | None,
    name: str | None,
    folder: Path | None,
    evaluator: bool,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    proxy: str | None,
) -> None:
    try:
        arguments = script_arguments(script, arguments)
        _set_environment(join, syncer, name, folder, ca, cert, key, proxy, evaluator=evaluator)
    except ConfigError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":  # every rank of this machine was given the same command
            raise SystemExit(error.exit_code) from error
        raise
    os.execv(sys.executable, [sys.executable, *RUNNER, *arguments])


def _set_environment(
    join: str | None,
    syncer: str | None,
    name: str | None,
    folder: Path | None,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    proxy: str | None,
    *,
    evaluator: bool,
) -> None:
    """Of a learner by hand. ConfigError: the run cannot be joined in this way."""
    if (where := read_link(join, "--join (or ATOLL_JOIN)") if join else syncer) is None:
        raise ConfigError("which run? Name it by --join LINK (or ATOLL_JOIN), as its syncer printed it")
    for variable, value in (("ATOLL_CA", ca), ("ATOLL_CERT", cert), ("ATOLL_KEY", key)):
        if value is not None:
            os.environ[variable] = str(value.absolute())
    if proxy is not None:
        os.environ["ATOLL_PROXY"] = proxy
    address = parse_address(where)
    address.context()  # what cannot be used is said now
    os.environ["ATOLL_SYNCER"] = where if where.startswith(SCHEME) else ",".join(address.urls)
    os.environ.pop("ATOLL_JOIN", None)
    if name is not None:
        os.environ["ATOLL_LEARNER"] = checked_name(name)
    os.environ["ATOLL_ROLE"] = "evaluator" if evaluator else "learner"
    if folder is not None:
        os.environ["ATOLL_FOLDER"] = str(folder.absolute())
        os.environ["ATOLL_MODELS"] = str(folder.absolute())  # where an evaluator keeps them
