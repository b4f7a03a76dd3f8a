"""Learners, couriers and the syncer die at random in a run on leased data; whoever dies comes back.

What became of every token and of every sample is read from the journal afterwards: all of them are accounted for.
"""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from tests.system.conftest import SCRIPTS, Run, members
from tests.system.crashing import facts, victims
from tests.system.crashing.samples import Samples

from atoll.protocol.history import History
from atoll.protocol.records import BegunRecord, MergedRecord

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

LEASED = (SCRIPTS / "lease.py", "--set", "evaluate_every=0")
LONGEST_CALM_S = 3.0
"""Between two kills: shorter and longer than a learner takes to come back."""
MOST = 4
"""Deaths of one process: the supervisor gives up one that dies more often in a minute."""


def storm(run: Run, learners: int, seed: int, kills: int, deaths: Counter[str]) -> None:
    """Chance says whom it hits, and how soon after the last; now and then two at once."""
    chance = random.Random(seed)
    names = ["syncer", *(f"{kind}-{n}" for kind in ("learner", "courier") for n in range(learners))]
    for _ in range(kills):
        time.sleep(chance.uniform(0.0, LONGEST_CALM_S))
        hit = [name for name in chance.sample(names, chance.choice((1, 1, 2))) if deaths[name] < MOST]
        deaths.update(name for name in hit if victims.pids(run, name))
        victims.kill(run, *hit)


def until_in_rounds(run: Run, learners: int, since: float) -> None:
    """Until so many learners were in rounds since then."""
    run.until(lambda events: len({name for name, _ in members([e for e in events if e["at"] > since])}) >= learners)


def check_all_accounted(run: Run) -> None:
    """By the verification, by the fold that a syncer makes of the journal, and by counting the samples one by one."""
    report = facts.check_files(run)
    assert report.facts["finished"] and report.facts["fragment_tokens"]["in_flight"] == 0
    records = facts.records(run)
    assert isinstance(records[0], BegunRecord)
    history = History(records[0])
    for record in records[1:]:
        history.apply(record)
    totals = history.ledger.totals()
    assert set(totals.balance()) == {0} and totals.fragment_tokens() == report.facts["fragment_tokens"]
    samples = Samples.of(records)
    samples.check_passes()
    fates = samples.fates()
    assert fates["held"] == 0 and fates["merged or dropped"] > 0
    assert history.leases is not None
    state = history.leases.state()
    assert not state.holdings, "nobody is there any more"
    pieces = [(p.dataset, p.epoch, position) for p in state.waiting for position in range(p.start, p.stop)]
    assert sorted(pieces) == list(samples.waiting())
    print(f"tokens {report.facts['tokens']}, samples {dict(fates)}, {report.facts['incarnations']} incarnations")


def survive(run: Run, seed: int, *, learners: int, kills: int) -> None:
    run.train(*LEASED, "--learners", str(learners))
    until_in_rounds(run, learners, since=0.0)
    deaths: Counter[str] = Counter()
    storm(run, learners, seed, kills, deaths)
    until_in_rounds(run, learners, since=time.time())
    run.interrupt()
    run.ended()
    print(f"killed: {dict(deaths)}")
    assert sum(deaths.values()) >= kills // 2
    facts.check_rounds(run, most_untold=deaths["syncer"])
    check_all_accounted(run)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(100, 120))
def test_every_token_and_every_sample_is_accounted_for_after_a_storm(run: Run, seed: int) -> None:
    survive(run, seed, learners=3, kills=10)


@pytest.mark.faults
def test_a_synchronous_pass_merges_every_sample_once_into_every_fragment(run: Run) -> None:
    words = ("--learners", "3", "--set", "synchronous=true", "--", "--epochs", "1", "--samples", "1500")
    run.train(*LEASED, *words).ended()
    records = facts.records(run)
    samples = Samples.of(records)
    everything = Counter((0, 0, position) for position in range(1500))
    assert samples.merged == dict.fromkeys(range(4), everything)
    assert samples.fates() == {"merged or dropped": 1500}
    tokens = Counter({r.fragment: 0 for r in records if isinstance(r, MergedRecord)})
    for record in records:
        if isinstance(record, MergedRecord):
            tokens[record.fragment] += sum(share.tokens for share in record.members)
    assert tokens == dict.fromkeys(range(4), 1500), "and nothing else"
    check_all_accounted(run)
