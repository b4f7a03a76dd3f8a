"""No task ends unnoticed: each is of a kind that says what happens when it fails (fabric/tasks.py).

Elsewhere tasks are started in TaskGroups alone, which pass errors on to their owner; each place says who that is.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "atoll"
STARTS = {"create_task", "ensure_future", "run_coroutine_threadsafe", "Thread", "start_new_thread"}

CONNECTION = "of one connection: what it raises ends the request, which is closed, logged and counted (Port._answer)"
VITAL = "of the run: what it raises ends the process"
KNOWN = {
    "bucket/uploader.py": (1, "threads that copy to the bucket: what one raises is an alarm, and it tries again"),
    "chaos/inject.py": (2, "faults of a test: what one raises ends the attack"),
    "chaos/rogue.py": (2, "a rogue's link and uploads: what one raises ends the rogue"),
    "courier/body.py": (2, VITAL + "; its learner starts another courier, or ends where it has several ranks"),
    "courier/rank_channel.py": (2, "couriers that come: what one raises ends the leader's courier, and the learner"),
    "courier/rank_leader.py": (1, VITAL + "; it ends the learner"),
    "courier/rank_follower.py": (1, "looks at what a rank lacks: what it raises is said, and it goes on"),
    "courier/service.py": (8, VITAL + "; its learner starts another courier, or ends where it has several ranks"),
    "courier/shards.py": (1, VITAL + "; its learner starts another courier"),
    "courier/states.py": (1, VITAL + "; its learner starts another courier"),
    "fabric/client.py": (2, "a learner's channel: what it raises ends its courier; and a look for its relay"),
    "fabric/control.py": (1, CONNECTION),
    "fabric/bodies.py": (1, "what is asked of all shards at once: an error is raised to whoever asks"),
    "fabric/shard_channel.py": (2, CONNECTION + "; a shard's end of it is vital to the shard"),
    "fabric/relay_channel.py": (1, CONNECTION),
    "fabric/tasks.py": (2, "the kinds themselves"),
    "baselines/faults.py": (1, "faults of a baseline: what one raises ends it"),
    "baselines/supervisor.py": (1, "asked for its result at every turn"),
    "launch/local.py": (1, "what goes on beside a run: its error is raised when the run is over"),
    "launch/on_ray/controller.py": (1, "a thread that is the run: what it raises is told to whoever watches"),
    "launch/script.py": (1, "a thread that ends its process when the supervisor is gone"),
    "learner/boundary.py": (1, "a thread that tells of copies sooner; without it the next boundary does"),
    "learner/copy_room.py": (1, "a thread that makes room for copies; without it they allocate for themselves"),
    "learner/courier_process.py": (1, "a thread that reads frames: what it raises is raised where they are taken"),
    "learner/evaluator.py": (1, "a thread that says it is there; without it the run's status calls it gone"),
    "learner/notebook.py": (1, "a thread that shows progress; without it the line stays as it is"),
    "learner/peer_state_transfer.py": (1, "a thread that answers whatever happens"),
    "learner/saved_state.py": (2, "a thread that answers whatever happens; the same for what is not merged"),
    "observe/tail.py": (1, "a thread that prints who comes and goes: no run waits for it"),
    "observe/dashboard/site.py": (2, CONNECTION),
    "relay/passage.py": (2, CONNECTION),
    "relay/process.py": (4, "of a relay: what it raises ends its process; learners go on directly"),
    "relay/service.py": (3, "of a relay: what it raises ends its process; learners go on directly"),
    "relay/versions.py": (1, "a fetch: what it raises is told to all who wait for it"),
    "store/removal.py": (1, "a thread that frees the room of removed files; what it leaves, the next removal takes"),
    "syncer/__main__.py": (1, "a thread that ends its process when the supervisor is gone"),
    "syncer/process.py": (6, VITAL),
    "syncer/shard_service.py": (4, VITAL + "; its supervisor starts another shard"),
    "syncer/service.py": (4, VITAL),
    "workloads/elastic.py": (1, "a thread that reads orders; without it the supervisor ends the process"),
}


def started(path: Path) -> int:
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    names = Counter(func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls)
    return sum(names[name] for name in STARTS)


def test_every_task_is_of_a_known_kind() -> None:
    found = {str(path.relative_to(SOURCE)): count for path in SOURCE.rglob("*.py") if (count := started(path))}
    assert found == {file: count for file, (count, _) in KNOWN.items()}
