"""`python -m atoll.courier FD`: started by a learner, with its end of the socket; not for people."""

from __future__ import annotations

import os
import sys

from atoll.courier.service import main

if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    # All is said and closed. Python would still take its modules apart, for a second or two on a busy machine, and the
    # training process waits for our end before its own.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
