"""`python -m atoll.courier FD`: started by a learner, with its end of the socket; not for people."""

from __future__ import annotations

import sys

from atoll.courier.service import main

if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
