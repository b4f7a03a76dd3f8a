"""An object store, by the few requests that a run needs of one. obstore speaks to S3, GCS, Azure, folders and memory.

Errors are of two kinds: StoreUnavailable may pass (it is slow, down, or answers with an error of its own), StoreRefused
will not (credentials, rights, a bucket that is not there). Both are one line with the next step. Retries are the
caller's: obstore itself tries twice.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec

from atoll.extras import missing
from atoll.protocol.errors import AtollError, ConfigError
from atoll.store.keys import KeyDir, check_private

T = TypeVar("T")

SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "adl", "azure", "file")
REQUEST_S = 60
"""Of one request: a part of 8 MiB on a link of 1.2 Mbit/s takes as long."""
CONNECT_S = 5
SILENT_S = 20.0
"""An answer is overdue after so long, and the time that the bytes take at `LEAST_BYTES_PER_S`."""
PART_BYTES = 8 * 2**20
"""Of a large file: its parts are sent beside each other, and each is tried again by itself."""
LEAST_BYTES_PER_S = PART_BYTES / REQUEST_S
PARTS = 4
CREDENTIALS = "store-credentials.json"
_VARIABLES = {"s3": "AWS_", "s3a": "AWS_", "gs": "GOOGLE_", "file": "", "": ""}
"""By scheme, how their names begin; the others are Azure's. A folder needs none, nor does a run without a store."""
_OF_A_MACHINE = re.compile(r"AWS_(PROFILE|CONFIG_FILE|SHARED_CREDENTIALS_FILE|CONTAINER_\w+|WEB_IDENTITY_\w+|ROLE_\w+)")
"""Where a machine has its role, and files in its home: elsewhere they lead nowhere."""
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


class StoreUnavailable(AtollError):
    """It may answer later."""


class StoreRefused(ConfigError):
    """Another try would not help."""


class TakenKey(AtollError):
    """An object that was to be created is there already."""


class MissingKey(AtollError):
    """An object is not there."""


class Bucket(Protocol):
    url: str

    def list_objects(self, prefix: str = "") -> dict[str, int]:
        """Keys below the store's own, with sizes."""

    def get(self, key: str) -> bytes:
        """MissingKey: it is not there."""

    def exists(self, key: str) -> bool: ...

    def create(self, key: str, data: bytes) -> None:
        """TakenKey: it is there already; whoever was first has it."""

    def put(self, key: str, data: bytes) -> None: ...

    def put_file(self, key: str, path: Path) -> None:
        """A large one in parts. FileNotFoundError: the local file is gone."""

    def get_file(self, key: str, path: Path) -> None: ...

    def delete(self, keys: list[str]) -> None:
        """Those that are not there count as deleted."""

    def describe_silence(self) -> str:
        """Say since when there is no answer, and to what; empty: none is overdue."""


class ObjectBucket:
    """A bucket, by obstore."""

    def __init__(self, url: str, store: Any) -> None:
        """Use `open_bucket`. `store`: one of obstore's."""
        self.url, self._store = url, store
        self._api: Any = import_module("obstore")
        self._overdue: tuple[float, float, str] | None = None
        """Of the requests since the last answer, the one whose answer is due first: when that is, when the request
        began, and what it is for. Several threads ask: one answer is enough for all."""

    def list_objects(self, prefix: str = "") -> dict[str, int]:
        def ask() -> dict[str, int]:
            pages = self._api.list(self._store, prefix=prefix or None)
            return {str(one["path"]): int(one["size"]) for page in pages for one in page}

        return self._ask("list", prefix, ask)

    def get(self, key: str) -> bytes:
        return self._ask("read", key, lambda: bytes(self._api.get(self._store, key).bytes()))

    def exists(self, key: str) -> bool:
        try:
            self._ask("look for", key, lambda: self._api.head(self._store, key))
        except MissingKey:
            return False
        return True

    def create(self, key: str, data: bytes) -> None:
        self._ask(
            "create", key, lambda: self._api.put(self._store, key, data, mode="create", use_multipart=False), len(data)
        )

    def put(self, key: str, data: bytes) -> None:
        self._ask("write", key, lambda: self._api.put(self._store, key, data, use_multipart=False), len(data))

    def put_file(self, key: str, path: Path) -> None:
        size = path.stat().st_size  # FileNotFoundError here is of the local file
        whole = size <= PART_BYTES
        self._ask(
            "write",
            key,
            lambda: self._api.put(
                self._store,
                key,
                path.read_bytes() if whole else path,
                use_multipart=not whole,
                chunk_size=PART_BYTES,
                max_concurrency=PARTS,
            ),
            size,
        )

    def get_file(self, key: str, path: Path) -> None:
        size = int(self._ask("look for", key, lambda: self._api.head(self._store, key))["size"])
        with path.open("wb") as file:
            # In parts: the time that one request may take covers all of its answer.
            for begin in range(0, size, PART_BYTES):
                end = min(begin + PART_BYTES, size)
                ask = partial(self._api.get_range, self._store, key, start=begin, end=end)
                part = self._ask("read", key, ask, end - begin)
                file.write(part)
            file.flush()
            os.fsync(file.fileno())

    def delete(self, keys: list[str]) -> None:
        for begin in range(0, len(keys), 1000):
            part = keys[begin : begin + 1000]
            try:
                self._ask("delete", part[0], partial(self._api.delete, self._store, part))
            except MissingKey:
                for key in part:  # a folder says so, and may have left the rest
                    self._delete_one(key)

    def _delete_one(self, key: str) -> None:
        try:
            self._ask("delete", key, lambda: self._api.delete(self._store, key))
        except MissingKey:
            return

    def describe_silence(self) -> str:
        now = time.monotonic()
        if (overdue := self._overdue) is None or now < overdue[0]:
            return ""
        return f"{self.url} has not answered for {now - overdue[1]:.0f} s; what waits: {overdue[2]}"

    def _ask(self, doing: str, key: str, request: Callable[[], T], nbytes: int = 0) -> T:
        """`nbytes`: what is sent or read."""
        now = time.monotonic()
        due = now + SILENT_S + nbytes / LEAST_BYTES_PER_S
        if (overdue := self._overdue) is None or due < overdue[0]:
            self._overdue = (due, now, f"{doing} {key}".rstrip())
        try:
            answer = self._request(doing, key, request)
        except StoreUnavailable:
            raise
        except AtollError:
            self._overdue = None
            raise
        self._overdue = None
        return answer

    def _request(self, doing: str, key: str, request: Callable[[], T]) -> T:
        errors = self._api.exceptions
        try:
            return _guard_panics(request)
        except errors.AlreadyExistsError as error:
            raise TakenKey(f"{self.url}/{key} is there already") from error
        except errors.PreconditionError as error:
            raise TakenKey(f"{self.url}/{key} is there already") from error
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise StoreRefused(
                    f"{self.url}: there is no such bucket: make it, or name another by --store"
                ) from error
            raise MissingKey(f"{self.url}/{key} is not there") from error
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            raise _refused(self.url, doing, str(error)) from error
        except (errors.BaseError, OSError, ValueError) as error:
            text = str(error)
            if refused := _find_refusal(self.url, doing, text):
                raise refused from error
            raise StoreUnavailable(f"cannot {doing} {self.url}/{key}: {_shorten(text)}") from error


def _guard_panics(request: Callable[[], T]) -> T:
    """What obstore itself gets wrong (a panic) is no Exception: it would end the thread that asked."""
    try:
        return request()
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise ValueError(f"obstore failed: {error}") from error
        raise


def open_bucket(url: str) -> ObjectBucket:
    """ConfigError says what is wrong with the URL, or that obstore is not installed. Nothing is asked of it yet."""
    check_url(url)
    try:
        stores: Any = import_module("obstore.store")
    except ImportError:
        raise missing("obstore", "--store") from None
    parts = urlsplit(url)
    if parts.scheme == "file":
        return ObjectBucket(url, stores.LocalStore(Path(parts.path), mkdir=True))
    _check_endpoint(parts.scheme)
    options: dict[str, Any] = {"timeout": f"{REQUEST_S}s", "connect_timeout": f"{CONNECT_S}s"}
    if _endpoint(parts.scheme).startswith("http://"):
        options["allow_http"] = True  # the operator named it so; obstore would refuse
    retry: dict[str, Any] = {"max_retries": 1, "retry_timeout": timedelta(seconds=CONNECT_S)}
    try:
        return ObjectBucket(url, stores.from_url(url, client_options=options, retry_config=retry))
    except Exception as error:  # obstore raises several kinds for what it cannot parse
        raise ConfigError(f"--store {url} is not understood: {_shorten(str(error))}") from error


def check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not (parts.netloc or parts.scheme == "file"):
        raise ConfigError(f"--store {url} is not understood: write it as s3://bucket/run, gs://…, az://… or file:///…")
    if parts.scheme == "file" and not parts.path.startswith("/"):
        raise ConfigError(f"--store {url} is not understood: a folder is written as file:///the/whole/path")
    if "@" in parts.netloc and parts.scheme in ("s3", "gs"):
        raise ConfigError("--store takes no secrets: they come from the environment, such as AWS_ACCESS_KEY_ID")


def _check_endpoint(scheme: str) -> None:
    for name in _ENDPOINTS if scheme.startswith("s3") else ():
        if name in os.environ and not os.environ[name].startswith(("http://", "https://")):
            raise ConfigError(f"{name}={os.environ[name]} is no address: write it as https://host, or unset it")


def _endpoint(scheme: str) -> str:
    names = _ENDPOINTS if scheme.startswith("s3") else ()
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


_EXPIRED = re.compile(r"ExpiredToken|TokenRefreshRequired|RequestExpired|token.{0,20}expired", re.IGNORECASE)
_NO_CREDENTIALS = re.compile(r"169\.254\.169\.254|metadata\.google|NoCredentials|CredentialsNotLoaded|PUT http://169")
_BAD_KEY = re.compile(r"InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|AuthFailure")
_DENIED = re.compile(r"AccessDenied|\b403\b|Forbidden|\b401\b")


def _find_refusal(url: str, doing: str, text: str) -> StoreRefused | None:
    known = (_EXPIRED, _NO_CREDENTIALS, _BAD_KEY, _DENIED)
    return _refused(url, doing, text) if any(one.search(text) for one in known) else None


def _refused(url: str, doing: str, text: str) -> StoreRefused:
    if _EXPIRED.search(text):
        return StoreRefused(f"{url}: the credentials have expired: renew them (AWS_SESSION_TOKEN, or sign in again)")
    if _NO_CREDENTIALS.search(text):
        return StoreRefused(
            f"{url}: no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or those of your "
            "cloud (docs/stores.md)"
        )
    if _BAD_KEY.search(text):
        return StoreRefused(f"{url}: the credentials are not accepted: check AWS_ACCESS_KEY_ID, its secret and region")
    return StoreRefused(
        f"{url}: the credentials may not {doing} there: docs/stores.md lists the rights that are needed"
    )


def _shorten(text: str) -> str:
    """What obstore says in one line: without its debug output, timings and the body of the answer."""
    first = text.partition("\n")[0].partition(": <?xml")[0]
    code = re.search(r"<Code>([^<]+)</Code>", text)
    first = re.sub(r"Error performing (\w+) \S+ in [\d.]+\S+( after \d+ retries[^-]*)? - ", "", first)
    return f"{first.removeprefix('Generic S3 error: ')[:200]}{f' ({code[1]})' if code else ''}"


# ---- credentials ----------------------------------------------------------------------------------------------------
# The variables that a bucket is opened with, where others open it than whoever named it: the syncers of a cluster. They
# are what the terminal had when it started the run or went on with it. They lie in the secrets of the run's folder
# (mode 600), which is never uploaded, so that a controller that is started again has them too. Where the terminal had
# none, each node's own count: its variables, or its role.


def select_credentials(url: str, environment: Mapping[str, str]) -> dict[str, str]:
    family = _VARIABLES.get(urlsplit(url).scheme, "AZURE_")
    return {
        name: value
        for name, value in sorted(environment.items())
        if family and name.startswith(family) and not _OF_A_MACHINE.fullmatch(name)
    }


def keep_credentials(secrets: Path, found: Mapping[str, str]) -> None:
    """In place of those that were kept before."""
    keys = KeyDir.create(secrets)
    if found:
        keys.write(keys.path / CREDENTIALS, msgspec.json.encode(found))
    else:
        (keys.path / CREDENTIALS).unlink(missing_ok=True)


def read_credentials(secrets: Path) -> dict[str, str]:
    """Those that were kept; empty: none."""
    path = secrets / CREDENTIALS
    if not path.exists():
        return {}
    check_private(path)
    return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
