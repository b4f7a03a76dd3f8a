"""Every error Atoll raises on purpose, in one tree.

    AtollError
    ├── ConfigError      the operator asked for something that cannot be: the text names the key and the fix
    │   └── MissingPackage   it needs a package that is not installed: the text has the command; also an ImportError
    ├── PlanError        a model does not fit the run, or cannot be cut into the fragments asked for
    ├── PeerError        the other side sent something that may not be: wrong size, version, type or order
    │   └── NotAdmitted      the syncer refuses the token, or its role
    ├── Unreachable      the other side cannot be reached now; trying again later may help
    │   └── WrongCertificate somebody else answers there: another address or link is needed
    └── RunFailed        the run cannot go on; the text says why and what to do next

Operators and peers get these; `assert` is for our own mistakes. A command prints the text of an AtollError as one
line, without a traceback.
"""

from __future__ import annotations


class AtollError(Exception):
    """The root: its text is one line for a person."""

    exit_code = 1


class ConfigError(AtollError):
    exit_code = 2


class MissingPackage(ConfigError, ImportError):
    pass


class PlanError(AtollError):
    exit_code = 2


class PeerError(AtollError):
    pass


class NotAdmitted(PeerError):
    pass


class Unreachable(AtollError):
    pass


class WrongCertificate(Unreachable):
    exit_code = 2


class RunFailed(AtollError):
    pass


def first_error(errors: BaseExceptionGroup[AtollError]) -> AtollError:
    first = errors.exceptions[0]
    return first_error(first) if isinstance(first, BaseExceptionGroup) else first
