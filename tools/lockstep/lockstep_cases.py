"""The cases that tools/decisions.py runs, and what each is for.

    sample            what make test runs
    small             int4 with feedback, fragments that are worked on by event loops
    wide              int8 both ways (versions as steps), fragments that are worked on in threads, one of which shards
                      cut inside a tensor; merges that need norms or a filter over shards; version 0 in bf16; learner-1
                      leaves before the end
    device            a learner whose device encodes what it sends
    refused           while a contribution is awaited, requests come that have to be refused: another session, another
                      round, one that is over, another size or digest, parameters that nobody asked for, fragments and
                      ranks that there are none of
    …-restarts        the syncer or a shard is killed while a round waits for a body, and started again
    rank-is-lost      the courier of a rank dies, and its learner with it

The runs of the crash matrix (tests/system/test_crash_matrix.py) are not among them. They are asynchronous: which rounds
are behind the run at a death, and who is in the next one, is a matter of time, so two of them have nothing in common
but the promises that those tests hold. The deaths here come in synchronous runs, at a fixed point of a fixed round. Of
these the journal, joins and ends of lives, adoptions, the model and the replay are compared. What processes say to each
other is not: how often somebody dials and asks again is a matter of time there.
"""

from __future__ import annotations

from lockstep_run import LAYOUTS, Case, LockstepRun

SMALL = {"steps": 12, "fragments": 2, "sync_every": 4, "overlap": 1, "cut_every": 4, "codec": "int4"}
THIRDS = {"steps": 8, "fragments": 3, "sync_every": 6, "overlap": 1, "cut_every": 3, "codec": "int8"}
"""For --wide: the last third is cut between two shards, inside a tensor."""
WIDE = {**THIRDS, "version_codec": "int8", "initial_codec": "bf16", "keep_cuts": 1}

AFTER_DEATH = ("journal", "members", "adopted", "model", "replay")
HELD = "PUT /v1/contributions/learner-1/2/1"
"""Its fragment is cut between shards, and between ranks."""


def wait_for_other(process: str, run: LockstepRun) -> None:
    """Wait until a process has all of learner-0's contribution to the round that is held."""
    sent = "PUT /v1/contributions/learner-0/2/1"
    run.wait_until(lambda: sent in run.read_tap(process), f"learner-0 has sent to {process}")


def restart_shard(run: LockstepRun) -> None:
    wait_for_other("shard-2", run)
    run.restart("shard-2")
    run.wait_until(lambda: any(event["over"] for event in run.read_events("alarm")), "shard 2 is back")


def restart_syncer(run: LockstepRun) -> None:
    wait_for_other("relay" if run.layout.relay else "syncer", run)
    run.restart("syncer")
    run.wait_until(lambda: len(run.read_events("returned", "recovered")) > 3, "both learners are connected again")


def lose_rank(run: LockstepRun) -> None:
    wait_for_other("syncer", run)
    run.kill_courier("learner-1.1")
    run.wait_until(lambda: bool(run.read_events("left", "lost")), "learner-1 is gone")


CASES = [
    Case("plain", "sample", {**SMALL, "steps": 6, "cut_every": 2}, replayed=False, about="the one that make test runs"),
    *(Case(layout, "small", SMALL, about="int4 with feedback, small fragments") for layout in LAYOUTS),
    *(
        Case(
            layout, "wide", {**WIDE, "merge": merge}, options, ("--wide", "--leave-after", "5"),
            about="int8 both ways, fragments in threads, a merge over shards, a learner leaves",
        )
        for layout, merge, options in (
            ("plain", "rda", ()),
            ("ranks", "rda", ()),
            ("shards", "rda", ()),
            ("relay", "rda-row", ()),
            ("ranks-shards", "rda-row", ("--robust",)),
        )
    ),
    Case("plain", "device", {**SMALL, "codec": "int8"}, script=("--device",), about="a learner's device encodes"),
    *(
        Case(
            layout, "refused", THIRDS, script=("--wide",), hold=HELD, held=held, replayed=False,
            about="requests that have to be refused while a body is awaited",
        )
        for layout, held in (("plain", 1), ("ranks", 2), ("shards", 2), ("relay", 1), ("ranks-shards", 4))
    ),
    Case(
        "shards", "shard-restarts", {**THIRDS, "codec": "bf16"}, script=("--wide",), hold=HELD, held=2,
        drive=restart_shard, sections=AFTER_DEATH, about="a shard dies while a round waits for a body",
    ),
    *(
        Case(
            layout, "syncer-restarts", {**THIRDS, "codec": "bf16"}, script=("--wide",), hold=HELD, held=held,
            drive=restart_syncer, sections=AFTER_DEATH, about="the syncer dies while a round waits for a body",
        )
        for layout, held in (("plain", 1), ("shards", 2), ("relay", 1))
    ),
    Case(
        "ranks", "rank-is-lost", THIRDS, script=("--wide",), hold=HELD, held=2, drive=lose_rank, replayed=False,
        may_fail=("learner-1.0", "learner-1.1"), sections=AFTER_DEATH, about="the courier of a rank dies",
    ),
]  # fmt: skip
