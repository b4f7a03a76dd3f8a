"""Planted bugs of the way back: what learners keep, what they may give, what the books say of it."""

from __future__ import annotations

from typing import Any

from tests.simulate.planting import Make, Plain, always, mutant, nothing

from atoll.protocol.learner.versions import Versions
from atoll.protocol.ledger import Ledger
from atoll.protocol.records import RestoredRecord
from atoll.protocol.syncer.membership import KnownLearner
from atoll.protocol.syncer.rollback import Rollback
from atoll.protocol.syncer.rounds import Rounds
from atoll.simulate import disk
from atoll.store import audit


def _merged_alone(plain: Plain) -> Any:
    return lambda self, fragment: self.merged[fragment]


def _next_versions(plain: Plain) -> Any:
    """Versions as they were: no new ones."""

    def broken(self: Rollback, now: float, ready: Any) -> None:
        self.state.versions = [version - 1 for version in self.state.versions]
        plain(self, now, ready)

    return broken


mutant("a learner keeps its own steps on top of a rollback", (Versions, "replaces_all", always(False)))
mutant("who has not taken a rollback contributes", (KnownLearner, "least_base", _merged_alone))
mutant("the ledger knows nothing of a rollback", (Ledger, "roll_back", nothing))
mutant("a rollback gives the versions of then their old numbers", (Rollback, "commit_rollback", _next_versions))
mutant("rounds go on behind a rollback that is under way", (Rounds, "abandon_rounds", nothing))


def _since(shift: int) -> Make:
    """Take back what was merged from another round on."""
    return lambda plain: lambda lines, since, fragments: plain(lines, since + shift, fragments)


for how, shift in (("a round too few", 1), ("a round too many", -1)):
    mutant(f"a rollback takes back {how}", (disk, "undone", _since(shift)), (audit, "undone", _since(shift)))


def _without_rollbacks(plain: Plain) -> Any:
    return lambda lines: plain(line for line in lines if not isinstance(line, RestoredRecord))


mutant("with durability = cut a rollback is not synced", (disk, "must_be_synced", _without_rollbacks))
