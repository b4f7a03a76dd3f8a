from __future__ import annotations

import msgspec
import numpy as np
import pytest
from tests.syncer.conftest import plan

from atoll.config import Outer
from atoll.digests import compute_digest
from atoll.protocol.errors import PeerError
from atoll.syncer.model import COPIES
from atoll.syncer.parameters import Parameters
from atoll.syncer.versions import OLD, is_finite

SGD = Outer(merge="mean", optimizer="sgd", lr=1.0, momentum=0.0)


def begun(outer: Outer = SGD, value: float = 1.0) -> Parameters:
    parameters = Parameters(plan(), outer)
    for part in plan().fragments:
        parameters.put_initial(part.index, np.full(part.size, value, dtype=np.float32), "mark")
    parameters.commit_initial()
    return parameters


def commit(parameters: Parameters, version: int, delta: float, fragment: int = 0) -> str:
    values = np.full(plan().fragments[fragment].size, delta, dtype=np.float32)
    mark = parameters.stage_merge(fragment, [values], [1.0])
    parameters.commit_version(fragment, version, round=10 * version)
    return mark


def read(data: memoryview) -> list[float]:
    return np.frombuffer(data, dtype=np.float32).tolist()


def test_before_the_first_parameters_there_is_nothing_to_read() -> None:
    with pytest.raises(PeerError, match="no parameters yet"):
        Parameters(plan(), SGD).serve_fragment(0)


def test_there_is_no_fragment_beyond_the_plan() -> None:
    with pytest.raises(PeerError, match="no fragment 2: the run has 2"):
        begun().serve_fragment(2)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_one_value_that_is_not_finite_is_seen(value: float) -> None:
    values = np.ones(1000, dtype=np.float32)
    assert is_finite(values)
    values[999] = value
    assert not is_finite(values)


def test_a_cut_is_written_from_the_outer_state_of_then_which_is_copied_only_where_it_changes() -> None:
    parameters = begun(Outer(merge="mean", optimizer="nesterov", lr=1.0, momentum=0.9))
    commit(parameters, 1, 0.5)
    arrays = parameters.hold_arrays()
    then = {name: values.tobytes() for name, values in arrays.items()}
    commit(parameters, 2, 0.25)
    parameters.reset_outer_state(1)
    assert {name: values.tobytes() for name, values in arrays.items()} == then
    now = parameters.hold_arrays()
    assert now["momentum-000"].tobytes() != then["momentum-000"]
    assert np.shares_memory(parameters.hold_arrays()["momentum-000"], now["momentum-000"]), "nothing is copied to look"


@pytest.mark.parametrize("outer", [SGD, msgspec.structs.replace(SGD, merge="rda-row-literal")])
def test_no_more_versions_are_held_than_the_memory_ceiling_counts(outer: Outer) -> None:
    """A cut is being written, and every version has a reader, which goes when it is asked to."""
    parameters, most = begun(outer), 0
    parameters.hold_arrays()
    for version in range(1, 8):
        served = parameters.serve_fragment(0)
        served.on_cut(served.release)
        parameters.stage_merge(0, [np.full(plan().fragments[0].size, 0.5, dtype=np.float32)], [1.0], bases=[-1])
        most = max(most, len(parameters._versions[0]._spare) + len(parameters._staged) + 1)
        parameters.commit_version(0, version, round=version)
    assert most == COPIES


def step_from(parameters: Parameters, base: int, delta: float) -> float:
    """What Θ becomes by one learner's step on this base, alone."""
    values = np.full(plan().fragments[0].size, delta, dtype=np.float32)
    before = parameters.committed_buffers()[0]
    parameters.stage_merge(0, [values], [1.0], bases=[base])
    parameters.commit_version(0, before.version + 1, before.round + 1)
    return float(parameters.committed_buffers()[0].values[0])


def test_the_literal_rule_takes_the_newest_theta_less_what_the_learner_has() -> None:
    """η = 1, so that Θ becomes θ itself, whatever was merged in between; usually steps add up."""
    literal, usual = (begun(msgspec.structs.replace(SGD, merge=rule)) for rule in ("rda-row-literal", "rda-row"))
    assert [step_from(one, 0, 0.5) for one in (literal, usual)] == [0.5, 0.5]
    assert [step_from(one, 0, 0.25) for one in (literal, usual)] == [0.75, 0.25], "θ = 1 − 0.25, on version 0"
    assert [step_from(one, 2, 0.125) for one in (literal, usual)] == [0.625, 0.125], (
        "on the newest there is no difference"
    )


def test_a_step_on_a_base_that_is_not_kept_counts_as_it_is() -> None:
    literal = begun(msgspec.structs.replace(SGD, merge="rda-row-literal"))
    for version in range(OLD + 1):
        step_from(literal, version, 0.125)
    theta = step_from(literal, 1, 0.0)
    assert theta == 1 - 0.125, "the oldest that is kept"
    assert step_from(literal, 1, 0.25) == theta - 0.25


@pytest.mark.parametrize("event", ["term", "cut", "rule"])
def test_bases_are_forgotten_in_a_new_term_with_a_cut_and_under_another_rule(event: str) -> None:
    """So that a replay, which begins with the same, makes the same of a step."""
    outer = msgspec.structs.replace(SGD, merge="rda-row-literal")
    literal = begun(outer)
    step_from(literal, 0, 0.5)
    if event == "term":
        literal.begin_term()
    elif event == "rule":
        literal.change_outer(SGD)
        literal.change_outer(outer)
    else:
        arrays, digests = literal.hold_arrays(), literal.known_digests()
        literal.load_cut({name: values.view(np.uint8) for name, values in arrays.items()}, digests, [1, 0], [0, -1])
    assert step_from(literal, 0, 0.25) == 0.25


def test_digests_of_versions_are_known_without_another_look_at_them() -> None:
    parameters = begun()
    mark = commit(parameters, 1, 0.5)
    assert parameters.known_digests() == {"theta-000": mark, "theta-001": "mark"}
    assert parameters.hold_arrays().keys() >= parameters.known_digests().keys()


def test_a_rollback_takes_its_values_over_without_a_copy() -> None:
    outer = Outer(merge="mean", optimizer="nesterov", lr=1.0, momentum=0.9)
    one, other = begun(outer), begun(outer)
    for parameters in (one, other):
        commit(parameters, 1, 0.5)
    packed = one.pack_state()
    commit(one, 2, 0.25)
    commit(other, 2, 0.25)
    digests = one.take_state(packed, (3, 1), 7)
    assert digests == other.restore_state(packed, (3, 1), 7), "as with a copy"
    assert np.shares_memory(packed, np.frombuffer(one.serve_fragment(0).data, dtype=np.uint8))
    assert one.take_state(packed.copy(), (4, 2), 8, ("known", "too")) == ("known", "too")
    for version in range(5, 8):
        assert commit(one, version, 0.125) == commit(other, version - 1, 0.125)
    with pytest.raises(ValueError, match="are not the values and outer state of this model"):
        one.take_state(packed[4:], (3, 1), 7)


def test_momentum_is_zero_at_the_first_round_of_a_phase_that_has_it() -> None:
    """Its array held the last gradient of the phase without: one step more in that direction would follow."""
    warm = Outer(merge="mean", optimizer="nesterov", lr=1.0, momentum=0.0)
    parameters = begun(warm)
    commit(parameters, 1, 0.5)
    parameters.change_outer(msgspec.structs.replace(warm, momentum=0.5))
    assert parameters.momentum(0) is None, "of zeros"
    commit(parameters, 2, 0.25)
    after_both = 1.0 - 0.5 - 0.25 * (1 + 0.5)
    assert set(read(parameters.serve_fragment(0).data)) == {after_both}


def test_a_rollback_to_where_momentum_was_off_begins_with_none() -> None:
    """Without momentum its array holds the last gradient of then."""
    outer = Outer(merge="mean", optimizer="nesterov", lr=1.0, momentum=0.0)
    parameters = begun(outer)
    commit(parameters, 1, 0.5)
    packed = parameters.pack_state()
    parameters.change_outer(msgspec.structs.replace(outer, momentum=0.9))
    commit(parameters, 2, 0.25)
    parameters.restore_state(packed, (3, 1), 7)
    held = [parameters.momentum(fragment) for fragment in range(2)]
    assert held == [None, None]


def test_a_reader_keeps_its_version_while_commits_go_on() -> None:
    parameters = begun()
    old = parameters.serve_fragment(0)
    for version in range(1, 5):
        commit(parameters, version, 0.25)
    assert set(read(old.data)) == {1.0} and old.version == 0
    new = parameters.serve_fragment(0)
    assert set(read(new.data)) == {0.0} and (new.version, new.round) == (4, 40)
    assert new.digest == compute_digest(new.data)


def test_two_buffers_are_enough_where_nobody_reads() -> None:
    parameters = begun()
    places = set()
    for version in range(1, 20):
        commit(parameters, version, 0.0)
        served = parameters.serve_fragment(0)
        places.add(np.frombuffer(served.data, dtype=np.uint8).ctypes.data)
        served.release()
        served.release()  # told twice, it counts once
    assert len(places) == 2


def test_a_staged_version_is_not_served_until_it_is_committed() -> None:
    parameters = begun()
    parameters.stage_merge(0, [np.ones(plan().fragments[0].size, dtype=np.float32)], [1.0])
    assert parameters.serve_fragment(0).version == 0


def test_an_outer_step_that_overflows_is_void_and_leaves_no_momentum_behind() -> None:
    outer = Outer(merge="mean", optimizer="nesterov", lr=1.0, momentum=0.9)
    parameters, fresh = begun(outer), begun(outer)
    huge = np.full(plan().fragments[0].size, 3e38, dtype=np.float32)
    with pytest.raises(ValueError, match="not finite"):
        parameters.stage_merge(0, [huge], [1.0])
    assert commit(parameters, 1, 0.5) == commit(fresh, 1, 0.5), "as if it had never been"
    assert np.isfinite(read(parameters.serve_fragment(0).data)).all()


def test_the_whole_model_by_name() -> None:
    parameters = begun()
    fragment = next(part.index for part in plan().fragments if part.pieces[0].label == "two")
    commit(parameters, 1, 0.5, fragment)
    whole = parameters.tensors_by_name()
    assert {name: tensor.shape for name, tensor in whole.items()} == {"one": (3,), "two": (2, 2)}
    assert (whole["two"] == 0.5).all() and (whole["one"] == 1.0).all()


def test_who_reads_too_slowly_is_cut_off_before_old_versions_pile_up() -> None:
    parameters, cut = begun(), []
    slow = [parameters.serve_fragment(0)]
    slow[0].on_cut(lambda: cut.append(0))
    for version in range(1, OLD + 3):
        commit(parameters, version, 0.25)
        slow.append(parameters.serve_fragment(0))
        slow[-1].on_cut(lambda version=version: cut.append(version))
    assert cut == [0, 1], "those of the oldest versions, and nobody twice"
    for one in slow:
        one.release()
    before = cut[:]
    commit(parameters, OLD + 3, 0.25)
    assert cut == before, "who has let go is not cut off"


def test_who_has_let_go_is_not_cut_off_for_one_that_has_not() -> None:
    """Its connection may long carry something else: an upload, another's body."""
    parameters, cut = begun(), []
    slow = parameters.serve_fragment(0)
    slow.on_cut(lambda: cut.append("slow"))
    for _ in range(100):
        honest = parameters.serve_fragment(0)
        honest.on_cut(lambda: cut.append("honest"))
        honest.release()
        honest.on_cut(lambda: cut.append("honest"))
    assert len(parameters.committed_buffers()[0].disconnects) == 1, "nothing of them is kept"
    later = []
    for version in range(1, OLD + 2):
        commit(parameters, version, 0.25)
        later.append(parameters.serve_fragment(0))
    assert cut == ["slow"]
