"""A folder that takes no more bytes, where no small file system can be mounted: what is written to it finds no room.

While a file `full` lies beside the folder, every os.write to a file below the folder fails with ENOSPC, as the journal
and the events are written. Laid around `os.write` in every process of a run (sitecustomize.py).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "full"


def lay(folder: str) -> None:
    mark, below = Path(folder).parent / MARK, os.path.realpath(folder) + os.sep
    write: Callable[[int, Any], int] = os.write

    def limited(descriptor: int, data: Any) -> int:
        if mark.exists() and os.path.realpath(f"/proc/self/fd/{descriptor}").startswith(below):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    os.write = limited
