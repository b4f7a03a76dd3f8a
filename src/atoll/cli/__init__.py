"""The command line. Every command says what it does with an example; a user's mistake is one line, not a traceback.

`declared` has the commands with their options and help, `command` parses and prints them, and the other modules run
them.
"""

from __future__ import annotations

import os
import select
import sys

from atoll.cli.command import call
from atoll.cli.declared import ATOLL
from atoll.protocol.errors import AtollError

__all__ = ["main"]


def main() -> None:
    program = "python -m atoll" if sys.argv[0].endswith("__main__.py") else "atoll"
    try:
        call(ATOLL, sys.argv[1:], program)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_reader_gone():
            raise
        sys.exit(141)  # as a program that SIGPIPE ends
    except AtollError as error:
        print(f"atoll: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _is_reader_gone() -> bool:
    """Whether who reads what we print, such as `head`, has read enough. Then nothing more is printed."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    gone = any(seen & select.POLLERR for _, seen in output.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone
