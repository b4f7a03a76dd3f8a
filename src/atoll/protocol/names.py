"""What a learner, a session, a process or a token may be called: names become parts of paths and addresses as they are.

So none begins with a dot or a dash: `..` is no learner, and no file is hidden or taken for an option.
"""

from __future__ import annotations

import re

LONGEST = 64
ALLOWED = f"use 1 to {LONGEST} of a-z, A-Z, 0-9, '.', '_' and '-', with a letter or a digit first"

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST - 1}}}")


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None
