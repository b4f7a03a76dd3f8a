"""When a learner that has made its last step may go, and what it says of itself.

- The end of the run is waited for: it leaves the final parameters in the model. One that leaves before stays until its
  last steps are merged; if the run ends meanwhile, it waits for that.
- Both waits end. Leaving early takes LEAVE_WAIT_S at most, longer where the others need longer for two cycles; DRAIN_S
  when a signal asked it to go, also if that comes while it waits.
"""

from __future__ import annotations

from atoll.learner.preempt import DRAIN_S

LEAVE_WAIT_S = 10.0
"""How long leaving early waits for the last steps to be merged; longer where the others need longer for two cycles."""
END_WAIT_S = 240.0
"""How long a learner waits for the run to end once it was told that it ends."""


def patience_s(cycle_s: float | None, *, hurried: bool) -> float:
    """How long leaving early may take. `cycle_s`: what H steps take here; None: there is nothing to wait for."""
    if cycle_s is None:
        return LEAVE_WAIT_S
    return DRAIN_S if hurried else max(LEAVE_WAIT_S, 2 * cycle_s)


class Leaving:
    def __init__(self, now: float, *, ending: bool) -> None:
        """`ending`: the run was told to end."""
        self._early, self._nothing_left, self._since = not ending, False, now

    def look(self, now: float, *, ending: bool, unmerged: bool) -> None:
        """`unmerged`: steps that no version holds yet."""
        if self._early and ending:
            self._early, self._since = False, now
        self._nothing_left = self._early and not unmerged

    def may_go(self, now: float, patience_s: float, *, replay: bool) -> bool:
        """`patience_s`: for leaving early. A replay is slow where it wants to be: no clock of ours ends it."""
        until = self._since + (patience_s if self._early else END_WAIT_S)
        return self._nothing_left or (now > until and not replay)

    def goodbye(self, asked: str, *, saved: bool) -> str:
        """For the run's events. `asked`: why somebody wanted it to go; empty: nobody did."""
        if asked:
            return f"{asked}; its state is {'saved' if saved else 'not saved: it has no folder'}"
        return "it left before the run ended" if self._early else "the end of the run did not come"


def broken_off(error: BaseException) -> str:
    """The goodbye of a learner whose script failed."""
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    return f"its training script ended with {type(error).__name__}"
