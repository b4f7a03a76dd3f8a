"""Fingerprints that the join links of a run name, kept in its folder.

A syncer on another machine has a copy of the run's keys. With other keys it would lock out every learner and relay, so
a standby compares them with these when it starts, and a syncer that goes on with a run says so. The syncer that serves
the run notes what links name now, since certificates are renewed while it goes on.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from atoll.cli.keys import pins_of
from atoll.cli.shared import short
from atoll.config import Service
from atoll.fabric.certificates import fingerprint, signs_itself
from atoll.protocol.errors import ConfigError
from atoll.store.atomic import write_atomic
from atoll.store.keys import KeyDir
from atoll.store.rundir import RunDir


class LinkedPins:
    """Of a run and the keys that a syncer is started with."""

    def __init__(self, out: RunDir, service: Service) -> None:
        self._file, self._service = out.linked_pins, service
        self._noted: frozenset[str] = frozenset()

    def describe_foreign(self) -> str:
        """Name the certificate if links that learners hold lead to none of these keys; empty: they do, or no syncer
        has noted what they name. Behind a proxy they name its certificate, which may differ between machines."""
        known = self._read()
        if not self._service.keys or self._service.front or not known or known & self._list_own():
            return ""
        keys = KeyDir(Path(self._service.keys))
        mark = fingerprint(keys.certificate.read_bytes())[:16]
        return f"the certificate in {short(keys.path)} (fingerprint {mark}…) is none that the links of this run name"

    def note(self) -> None:
        """Keep what links name now beside what they named before: learners hold those too."""
        if not self._service.keys or self._service.front:
            return
        with suppress(ConfigError, OSError):  # a certificate is being replaced, or the disk is full: the next time
            own, known = self._list_own(), self._read()
            if own == self._noted:
                return
            if not own <= known:
                # Links of other keys lead nowhere any more.
                named = known | own if known & own else own
                write_atomic(self._file, msgspec.json.encode(sorted(named)))
            self._noted = own

    def _read(self) -> frozenset[str]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=frozenset[str])
        except (OSError, msgspec.MsgspecError):
            return frozenset()

    def _list_own(self) -> frozenset[str]:
        """The certificates that links name, and the authority of the current one: links that end with ca are good for
        every certificate of it."""
        keys = KeyDir(Path(self._service.keys))
        own = frozenset(pins_of(keys).split(","))
        if keys.authority.is_file() and not signs_itself(keys.certificate.read_bytes()):
            own |= {fingerprint(keys.authority.read_bytes())}
        return own
