"""How long whoever is asked for the first parameters has for them: as long as fragments keep coming.

A large model over a slow link takes hours, and may. But nothing begins before version 0 is there, so one that is asked
and sends nothing, or never comes to the end of a fragment, would hold up the run for good: then the next joiner is
asked. Where there is no other, there is nothing to gain, and it keeps its turn until one comes.
"""

from __future__ import annotations

UPLOAD_S = 60.0
"""Without a fragment that was not there before, and without …"""
UPLOAD_RATE = 32 * 1024
"""… what the largest one that was begun takes at so many bytes a second: half of what a body must come at."""


class Upload:
    def __init__(self) -> None:
        self.begun = False
        """Something of it has come, or is coming."""
        self.tried: set[str] = set()
        """Those that had their chance: they are asked again only when there is nobody else."""
        self._since: float | None = None
        self._size = 0

    def asked(self) -> None:
        """Somebody is asked, from now on."""
        self.begun, self._since, self._size = False, None, 0

    def gave_up(self, uploader: str, there: set[str]) -> None:
        """Once all have had their chance, it begins anew, with the others first."""
        self.tried = self.tried | {uploader} if there - self.tried - {uploader} else {uploader}

    def moved(self, now: float, size: int) -> None:
        """A fragment of so many bytes begins to come; 0: one that was not there before is whole."""
        self.begun, self._size = True, max(self._size, size)
        if not size:
            self._since = now

    def until(self, now: float) -> float:
        self._since = now if self._since is None else self._since
        return self._since + UPLOAD_S + self._size / UPLOAD_RATE
