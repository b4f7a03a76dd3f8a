"""The filter, attacked: learners that agree a little, and one or two that do something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from atoll.numerics import sample
from atoll.numerics.arrays import FloatArray
from atoll.numerics.filter import CLIP, MOMENTUM_SHARE, ROUNDS, Filter, FilterVerdict
from atoll.numerics.fragments import FragmentPlan, make_plan
from atoll.numerics.sample import draw_sample
from atoll.protocol.messages import TensorSpec

PLAN = make_plan(
    [
        TensorSpec("a.weight", (64, 64), "float32"),
        TensorSpec("a.bias", (64,), "float32"),
        TensorSpec("b.weight", (80, 64), "float32"),
    ],
    2,
)
COMMON = 0.3
"""Of what honest learners give, in the direction that they share: cosines of about 0.08."""

SECRET = 5
LARGE = make_plan([TensorSpec("a", (250, 320), "float32"), TensorSpec("b", (200, 375), "float32")], 2)
SAMPLED = 6_000
"""Values that a sample of a fragment of it holds, about, one in 13."""

Verdicts = dict[str, FilterVerdict]
Attack = Callable[[FloatArray, FloatArray | None, np.random.Generator], FloatArray]


def noise(delta: FloatArray, _: FloatArray | None, dice: np.random.Generator) -> FloatArray:
    return dice.standard_normal(delta.size, dtype=np.float32)


def draw_rounds(
    attack: Attack | None, attackers: int, rounds: int, learners: int, seed: int, plan: FragmentPlan
) -> Iterator[list[FloatArray]]:
    """What `learners` give, the last of which attack; fragments take turns."""
    dice, first = np.random.default_rng(seed), {}
    for number in range(rounds):
        fragment = number % 2
        size = plan.fragments[fragment].size
        common = COMMON * dice.standard_normal(size, dtype=np.float32)
        deltas = [common + dice.standard_normal(size, dtype=np.float32) for _ in range(learners)]
        for i in range(learners - attackers, learners) if attack is not None else ():
            deltas[i] = attack(deltas[i], first.get((i, fragment)), dice)
            first.setdefault((i, fragment), deltas[i])
        yield deltas


def play_both(
    attack: Attack | None,
    attackers: int = 1,
    rounds: int = 40,
    learners: int = 8,
    seed: int = 0,
    plan: FragmentPlan = PLAN,
) -> tuple[list[Verdicts], list[Verdicts]]:
    """The same rounds before a filter that sees all of each contribution, and before one that sees samples."""
    exact, sampling = Filter(plan, secret=SECRET), Filter(plan, secret=SECRET)
    names = [f"l{i}" for i in range(learners)]
    told: tuple[list[Verdicts], list[Verdicts]] = ([], [])
    for number, deltas in enumerate(draw_rounds(attack, attackers, rounds, learners, seed, plan)):
        fragment = number % 2
        told[0].append(dict(zip(names, exact.judge(fragment, names, deltas), strict=True)))
        told[1].append(
            dict(zip(names, sampling.judge(fragment, names, deltas, round=number, sample=True), strict=True))
        )
    return told


def play(
    attack: Attack | None, attackers: int = 1, rounds: int = 40, learners: int = 8, seed: int = 0
) -> list[Verdicts]:
    filter_, names = Filter(PLAN, secret=SECRET), [f"l{i}" for i in range(learners)]
    return [
        dict(zip(names, filter_.judge(number % 2, names, deltas), strict=True))
        for number, deltas in enumerate(draw_rounds(attack, attackers, rounds, learners, seed, PLAN))
    ]


def suspects(told: list[Verdicts]) -> set[str]:
    return {name for one in told for name, judged in one.items() if judged.suspect}


ATTACKS: dict[str, Attack] = {
    "flip": lambda delta, _, __: -delta,
    "x5": lambda delta, _, __: 5 * delta,
    "stale": lambda delta, first, __: delta if first is None else first,
    "constant": lambda delta, _, __: np.full_like(delta, 1.0),
    "noise": noise,
}


@pytest.mark.parametrize("attackers", [1, 2])
@pytest.mark.parametrize("attack", list(ATTACKS))
def test_an_attacker_is_named_and_left_out_and_nobody_else_is(attack: str, attackers: int) -> None:
    told = play(ATTACKS[attack], attackers)
    hostile = {f"l{i}" for i in range(8 - attackers, 8)}
    assert suspects(told) == hostile
    for name, judged in told[-1].items():
        assert (judged.factors == (0 if name in hostile else 1)).all(), name


@pytest.mark.parametrize("seed", range(5))
def test_honest_learners_are_left_as_they_are(seed: int) -> None:
    told = play(None, seed=seed)
    assert suspects(told) == set()
    factors = np.concatenate([judged.factors for one in told for judged in one.values()])
    assert np.mean(factors == 1) > 0.995


def test_nobody_is_suspect_before_there_is_evidence() -> None:
    told = play(ATTACKS["noise"], rounds=ROUNDS)
    assert suspects(told[:-1]) == set() and suspects(told) == {"l7"}


def test_who_points_against_the_others_is_left_out_at_once() -> None:
    judged = play(ATTACKS["flip"], rounds=1)[0]["l7"]
    assert not judged.factors.any() and not judged.suspect and judged.agreement < 0


def test_a_loud_tensor_is_shortened_to_a_multiple_of_the_median_norm() -> None:
    judged = play(ATTACKS["x5"], rounds=1)[0]["l7"]
    assert judged.factors == pytest.approx(np.full(judged.factors.size, CLIP / 5), rel=0.1)


def test_two_that_give_the_same_noise_do_not_vouch_for_each_other() -> None:
    def shared(delta: FloatArray, _: FloatArray | None, dice: np.random.Generator) -> FloatArray:
        return np.random.default_rng(int(1e6 * abs(drawn[0]))).standard_normal(delta.size).astype(np.float32)

    told, filter_, dice = [], Filter(PLAN), np.random.default_rng(0)
    for number in range(40):
        size = PLAN.fragments[number % 2].size
        drawn = dice.standard_normal(size)
        deltas = [(COMMON * drawn + dice.standard_normal(size)).astype(np.float32) for _ in range(6)]
        deltas += [shared(deltas[0], None, dice)] * 2
        names = [f"l{i}" for i in range(8)]
        told.append(dict(zip(names, filter_.judge(number % 2, names, deltas), strict=True)))
    assert suspects(told) == {"l6", "l7"}


def test_where_nobody_agrees_nobody_is_suspect() -> None:
    """Gradients that are orthogonal say nothing about who is honest."""
    assert suspects(play(noise, attackers=8)) == set()


def test_who_mends_its_ways_is_trusted_again() -> None:
    dice, filter_ = np.random.default_rng(0), Filter(PLAN)
    told = []
    for number in range(80):
        size = PLAN.fragments[number % 2].size
        common = dice.standard_normal(size)
        deltas = [(COMMON * common + dice.standard_normal(size)).astype(np.float32) for _ in range(5)]
        deltas[4] *= -1 if number < 20 else 1
        names = [f"l{i}" for i in range(5)]
        told.append(dict(zip(names, filter_.judge(number % 2, names, deltas), strict=True)))
    assert told[19]["l4"].suspect and not told[-1]["l4"].suspect and (told[-1]["l4"].factors == 1).all()


def test_a_round_of_one_is_held_to_the_usual_norm_and_to_the_momentum() -> None:
    dice, filter_ = np.random.default_rng(0), Filter(PLAN)
    size = PLAN.fragments[0].size
    common = dice.standard_normal(size)

    def honest() -> FloatArray:
        return (COMMON * common + dice.standard_normal(size)).astype(np.float32)

    for _ in range(4):
        filter_.judge(0, ["a", "b", "c"], [honest(), honest(), honest()])
    momentum = common.astype(np.float32)
    alone = filter_.judge(0, ["a"], [honest()], momentum)[0]
    assert alone.factors == pytest.approx(np.ones(alone.factors.size), abs=0.15) and alone.agreement > 0
    loud = filter_.judge(0, ["a"], [9 * honest()], momentum)[0]
    assert loud.factors == pytest.approx(np.full(loud.factors.size, 1 / 9), rel=0.2)
    back = filter_.judge(0, ["a"], [-honest()], momentum)[0]
    assert back.factors == pytest.approx(np.full(back.factors.size, MOMENTUM_SHARE), rel=0.2)


def test_after_a_step_that_was_too_long_a_run_of_one_turns_round() -> None:
    """What pointed against the momentum was left out whole, so the momentum stayed as it was, for good."""
    filter_, size = Filter(PLAN), PLAN.fragments[0].size
    ahead = np.ones(size, np.float32)
    momentum = ahead.copy()
    for _ in range(10):
        factors = filter_.judge(0, ["a"], [-ahead], momentum)[0].factors
        momentum = 0.6 * momentum - float(factors.mean()) * ahead
    assert momentum[0] < 0


def test_a_suspect_stays_out_of_rounds_of_one() -> None:
    dice, filter_ = np.random.default_rng(0), Filter(PLAN)
    size = PLAN.fragments[0].size
    for _ in range(20):
        common = dice.standard_normal(size)
        honest = [(COMMON * common + dice.standard_normal(size)).astype(np.float32) for _ in range(4)]
        filter_.judge(0, ["a", "b", "c", "d"], [*honest[:3], -honest[3]])
    assert not filter_.judge(0, ["d"], [honest[0]])[0].factors.any()


def test_equal_inputs_give_equal_bits() -> None:
    one, other = play(ATTACKS["noise"], seed=3), play(ATTACKS["noise"], seed=3)
    for left, right in zip(one, other, strict=True):
        for name, judged in left.items():
            assert judged.factors.tobytes() == right[name].factors.tobytes()
            assert judged.agreement == right[name].agreement


def test_huge_and_empty_contributions_are_judged_too() -> None:
    size = PLAN.fragments[0].size
    dice = np.random.default_rng(0)
    usual = [dice.standard_normal(size).astype(np.float32) for _ in range(3)]
    deltas = [*usual, np.full(size, 3e38, np.float32), np.zeros(size, np.float32)]
    judged = Filter(PLAN).judge(0, list("abcde"), deltas)
    assert all(np.isfinite(one.factors).all() and np.isfinite(one.agreement) for one in judged)
    assert (judged[3].factors < 1e-30).all()


def test_where_all_go_the_same_way_again_and_again_nobody_is_suspect() -> None:
    """A model of few numbers has few directions."""
    size = PLAN.fragments[0].size
    filter_, names = Filter(PLAN), list("abcd")
    told = [filter_.judge(0, names, [np.full(size, 0.25, np.float32)] * 4) for _ in range(20)]
    assert not any(judged.suspect for one in told for judged in one)


def test_where_all_nearly_repeat_themselves_one_that_does_so_a_little_more_is_no_suspect() -> None:
    """Cosines of about 0.985 for one and 0.975 for the others."""
    size, dice = PLAN.fragments[0].size, np.random.default_rng(1)
    filter_, names, common = Filter(PLAN), list("abcd"), dice.standard_normal(size)
    for _ in range(20):
        noise = dice.standard_normal((4, size)) * np.array([[0.12], [0.16], [0.16], [0.16]])
        judged = filter_.judge(0, names, [(common + one).astype(np.float32) for one in noise])
        assert not any(one.suspect for one in judged)
    repeated = (common + noise[0]).astype(np.float32)
    for _ in range(4):
        noise = 0.16 * dice.standard_normal((3, size))
        judged = filter_.judge(0, names, [repeated, *((common + one).astype(np.float32) for one in noise)])
    assert [bool(one.suspect) for one in judged] == [True, False, False, False], "the same bits again and again"


# ---- by samples -----------------------------------------------------------------------------------------------------


@pytest.fixture
def _small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "LEAST", SAMPLED)


def first_named(told: list[Verdicts], name: str) -> int:
    return next(number for number, one in enumerate(told) if one[name].suspect)


@pytest.mark.usefixtures("_small_samples")
@pytest.mark.parametrize("attackers", [1, 2])
@pytest.mark.parametrize("attack", list(ATTACKS))
def test_by_samples_an_attacker_is_named_as_soon_and_nobody_else_is(attack: str, attackers: int) -> None:
    exact, sampled = play_both(ATTACKS[attack], attackers, 24, plan=LARGE)
    hostile = {f"l{i}" for i in range(8 - attackers, 8)}
    assert suspects(sampled) == hostile
    for name in hostile:
        assert first_named(sampled, name) == first_named(exact, name)


@pytest.mark.usefixtures("_small_samples")
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.faults) for seed in range(2, 12))])
def test_by_samples_honest_learners_are_not_suspect_and_agree_as_much(seed: int) -> None:
    exact, sampled = play_both(None, rounds=24, seed=seed, plan=LARGE)
    assert suspects(sampled) == set()
    errors = [
        one[name].agreement - judged.agreement
        for one, other in zip(sampled, exact, strict=True)
        for name, judged in other.items()
    ]
    assert 0 < max(map(abs, errors)) < 4 / np.sqrt(SAMPLED) and abs(np.mean(errors)) < 1 / np.sqrt(SAMPLED)


@pytest.mark.usefixtures("_small_samples")
def test_who_does_well_in_the_samples_of_another_secret_is_named() -> None:
    """Whoever knew the samples would flip the sign of everything else."""

    def play_on(secret: int) -> str:
        dice, filter_, names = np.random.default_rng(0), Filter(LARGE, secret=secret), list("abcd")
        for number in range(12):
            fragment = LARGE.fragments[0]
            common = dice.standard_normal(fragment.size)
            deltas = [(COMMON * common + dice.standard_normal(fragment.size)).astype(np.float32) for _ in names]
            places = draw_sample(fragment, [SECRET, 0, number + 1]).take(np.arange(fragment.size, dtype=np.float32))
            flipped = -deltas[3]
            flipped[places.astype(int)] *= -1
            judged = filter_.judge(0, names, [*deltas[:3], flipped], round=number, sample=True)
            assert not any(one.suspect for one in judged[:3])
        return judged[3].suspect

    assert play_on(SECRET + 1).startswith("its agreement with the others is -")
    assert play_on(SECRET) == "", "so the test's attacker does what it should"


def test_small_fragments_are_judged_in_full_where_a_sample_would_do() -> None:
    exact, sampled = play_both(ATTACKS["x5"])
    for left, right in zip(exact, sampled, strict=True):
        for name, judged in left.items():
            assert judged.factors.tobytes() == right[name].factors.tobytes()
            assert (judged.agreement, judged.suspect) == (right[name].agreement, right[name].suspect)


@pytest.mark.usefixtures("_small_samples")
def test_samples_leave_the_usual_norm_alone() -> None:
    """A sample's norm is another one: with it, a round of one would be shortened to a quarter once factors are used."""
    size, dice, filter_ = LARGE.fragments[0].size, np.random.default_rng(0), Filter(LARGE)
    deltas = [dice.standard_normal(size).astype(np.float32) for _ in range(3)]
    filter_.judge(0, list("abc"), deltas, sample=True)
    assert (filter_.judge(0, ["a"], deltas[:1])[0].factors == 1).all()
    filter_.judge(0, list("abc"), deltas)
    assert filter_.judge(0, ["a"], deltas[:1])[0].factors == pytest.approx(np.ones(1), abs=0.02)
    assert (filter_.judge(0, ["a"], deltas[:1], round=1, sample=True)[0].factors == 1).all()


H = 24


def grown_round(number: int, dice: np.random.Generator) -> tuple[list[FloatArray], list[int]]:
    """Two learners that have H steps, and three that joined at once and have one more in each round."""
    size, steps = PLAN.fragments[number % 2].size, [H, H, *[min(H, number + 1)] * 3]
    common = COMMON * dice.standard_normal(size, dtype=np.float32)
    return [n * (common + dice.standard_normal(size, dtype=np.float32)) for n in steps], steps


def test_learners_of_before_are_no_suspects_beside_as_many_new_ones() -> None:
    filter_, names, dice = Filter(PLAN, sync_every=H), list("abcde"), np.random.default_rng(0)
    for number in range(2 * H):
        deltas, steps = grown_round(number, dice)
        judged = filter_.judge(number % 2, names, deltas, steps=steps)
        assert not [one.suspect for one in judged if one.suspect]
        factors = np.concatenate([one.factors for one in judged])
        assert np.mean(factors == 1) > 0.9 and factors.min() >= 0, number
    usual = filter_.judge(1, ["a"], deltas[:1])[0].factors
    assert usual == pytest.approx(np.ones(count_pieces(1)), abs=0.1), "newcomers made nothing small usual"


def count_pieces(fragment: int) -> int:
    return len(PLAN.fragments[fragment].pieces)


def test_steps_that_only_one_claims_excuse_no_norm() -> None:
    filter_, names, dice = Filter(PLAN, sync_every=H), list("abcde"), np.random.default_rng(0)
    for number in range(ROUNDS):
        size = PLAN.fragments[number % 2].size
        common = COMMON * dice.standard_normal(size, dtype=np.float32)
        deltas = [common + dice.standard_normal(size, dtype=np.float32) for _ in range(5)]
        claims = [H, H, H, H, 10 * H]
        judged = filter_.judge(number % 2, names, [*deltas[:4], 10 * deltas[4]], steps=claims)
        if number == 0:
            assert judged[4].factors == pytest.approx(np.full(count_pieces(0), CLIP / 10), rel=0.1)
    assert "times as large" in judged[4].suspect
