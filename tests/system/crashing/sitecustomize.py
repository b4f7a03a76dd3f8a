"""Arms the syncer of a run: Python imports this at the start of every process that has this folder on its PYTHONPATH.

Only a process that was started as `python -m atoll.syncer` with ATOLL_CRASH_AT in its environment is touched.
"""

import os
import sys

if "ATOLL_CRASH_AT" in os.environ and "atoll.syncer" in sys.orig_argv:
    import deadly

    deadly.arm(os.environ["ATOLL_CRASH_AT"], sys.orig_argv[sys.orig_argv.index("atoll.syncer") + 1])
