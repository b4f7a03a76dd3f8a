"""All planted bugs: what a tired programmer might write instead of the protocol's rules, switched on in tests only.

A mutant names what it does wrong and takes the place of one or two functions while `planted` is open. Where a rule is
kept in several places (a learner declines what the syncer would refuse anyway), its mutant forgets it in all of them:
otherwise the second guard hides the first one's bug.
"""

from tests.simulate import (
    bugs_of_learners,
    bugs_of_ranks,
    bugs_of_relays,
    bugs_of_rollbacks,
    bugs_of_rounds,
    bugs_of_shards,
    bugs_of_writing,
)
from tests.simulate.planting import MUTANTS, planted

__all__ = [
    "MUTANTS",
    "bugs_of_learners",
    "bugs_of_ranks",
    "bugs_of_relays",
    "bugs_of_rollbacks",
    "bugs_of_rounds",
    "bugs_of_shards",
    "bugs_of_writing",
    "planted",
]
