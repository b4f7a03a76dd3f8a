"""model-best.safetensors against the journal: every fragment in it is a version that the run had committed.

The values of then cannot be made again once outer gradients are trimmed, but the journal keeps the digest of every
version. Of version 0, and of what a run that was begun from a cut had before, it has none: those are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from atoll.numerics.fragments import Fragment, elements, make_plan
from atoll.protocol.records import Begun, Merged, Restored
from atoll.store.cuts import digest
from atoll.store.disk import LocalDisk
from atoll.store.journal import read
from atoll.store.rundir import RunDir, read_model_facts


@dataclass(frozen=True, slots=True)
class BestChecked:
    problem: str = ""
    unknown: int = 0
    """Fragments of which the journal has no digest."""


def check_best(run: RunDir, begun: Begun) -> BestChecked:
    """No problem: every fragment of which the journal knows is as it was committed, or there is no such file."""
    path = run.best_model
    if not path.exists():
        return BestChecked()
    facts = read_model_facts(path)
    if facts.get("run") != begun.run:
        return BestChecked(f"{path} is of run {facts.get('run') or 'nobody knows'}, not of {begun.run}")
    plan = make_plan(begun.tensors, begun.settings.fragments, begun.settings.plan)
    versions = [int(one) for one in facts.get("versions", "").split(",") if one.isdigit()]
    if len(versions) != len(plan.fragments):
        return BestChecked(f"{path} does not say which versions it holds")
    due = committed_digests(run.journal, versions)
    wrong = _differing(path, [part for part in plan.fragments if part.index in due], due)
    problem = f"{path} is not what the run had committed: {wrong}" if wrong else ""
    return BestChecked(problem, len(versions) - len(due))


def committed_digests(journal: Path, versions: list[int]) -> dict[int, str]:
    """By fragment, what the journal says of these versions."""
    found: dict[int, str] = {}
    for _, record in read(journal, disk=LocalDisk()):
        if isinstance(record, Merged) and record.version == versions[record.fragment]:
            found[record.fragment] = record.digest
        elif isinstance(record, Restored):
            restored = zip(record.versions, record.digests, strict=True)
            found |= {f: mark for f, (version, mark) in enumerate(restored) if version == versions[f]}
    return found


def _differing(path: Path, parts: list[Fragment], due: dict[int, str]) -> str:
    """The first fragment whose values have another digest; empty: none."""
    try:
        with safe_open(path, framework="numpy") as file:
            for part in parts:
                values = np.zeros(part.size, dtype=np.float32)
                for tensor, start in zip(part.tensors, part.offsets, strict=True):
                    values[start : start + elements(tensor)] = file.get_tensor(tensor.name_in_model).ravel()
                if digest(values.view(np.uint8).data) != due[part.index]:
                    return f"fragment {part.index} has other values than the journal's digest"
    except (SafetensorError, OSError, ValueError) as error:
        return f"it cannot be read: {error}"
    return ""
