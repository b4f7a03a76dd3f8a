"""Where a script finds its run.

    ATOLL_SYNCER    set by atoll train and atoll learn
    ATOLL_JOIN      for plain `python script.py`: a join link, a file that holds one and nobody else may read, or the
                    address of a syncer on this machine

Without either the script trains alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from atoll.learner.ending import end_script
from atoll.protocol.errors import ConfigError
from atoll.store.keys import read_link


def find_syncer(environment: Mapping[str, str]) -> str:
    """A join link or addresses; empty: this script is alone. A file that others can read ends the script."""
    if named := environment.get("ATOLL_SYNCER"):
        return named
    try:
        return read_link(environment["ATOLL_JOIN"]) if environment.get("ATOLL_JOIN") else ""
    except ConfigError as error:
        end_script(str(error), error.exit_code, error)
