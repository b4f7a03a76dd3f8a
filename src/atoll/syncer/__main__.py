"""`python -m atoll.syncer RUN_DIR [--evaluated]`: the syncer of a run whose directory is made; started by a launcher."""

from __future__ import annotations

import sys
from pathlib import Path

from atoll.config import load
from atoll.store.rundir import RunDir
from atoll.syncer.process import serve

if __name__ == "__main__":
    out = RunDir(Path(sys.argv[1]))
    sys.exit(serve(load(out.settings), out, evaluated="--evaluated" in sys.argv[2:]))
