"""The golden histories of Streaming DiLoCo: two replicas, two one-weight fragments at 1, each inner step subtracts 2,
outer SGD with η = 2, each fragment every 6 steps, offsets 3 and 6."""

import pytest
from tests.protocol.world import World


def histories(steps: int = 9, **settings: object) -> tuple[list[float], list[float]]:
    world = World(
        learners=2,
        fragments=2,
        sync_every=6,
        synchronous=True,
        outer_lr=2.0,
        gradient=lambda t: 2.0,
        steps=0,
        **settings,
    )
    world.run_until(seconds=steps + 0.5)
    first, second = (learner.history[: steps + 1] for learner in world.learners.values())
    assert first == second, "replicas that see the same data stay equal"
    return [h[0] for h in first], [h[1] for h in first]


def test_no_overlap_overwrite() -> None:
    one, two = histories(overlap=0)
    assert one == [1, -1, -3, -11, -13, -15, -17, -19, -21, -35]
    assert two == [1, -1, -3, -5, -7, -9, -23, -25, -27, -29]


def test_overlap_of_one_step_overwrite() -> None:
    one, two = histories(overlap=1)
    assert one == [1, -1, -3, -7, -9, -11, -13, -15, -17, -27]
    assert two == [1, -1, -3, -5, -7, -9, -19, -21, -23, -25]


def test_no_overlap_blend_half() -> None:
    """Fragment 0 at step 3: θ = −5, Δ = 1 + 5 = 6, Θ = 1 − 12 = −11, θ ← (−5 − 11)/2 = −8.
    At step 9: θ = −8 − 12 = −20, Δ = −11 + 20 = 9, Θ = −11 − 18 = −29, θ ← (−20 − 29)/2 = −24.5.
    Fragment 1 at step 6: θ = −11, Δ = 12, Θ = −23, θ ← −17."""
    one, two = histories(overlap=0, adopt="blend", blend=0.5)
    assert one == [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5]
    assert two == [1, -1, -3, -5, -7, -9, -17, -19, -21, -23]


def test_no_overlap_blend_one_keeps_the_own_values() -> None:
    one, two = histories(overlap=0, adopt="blend", blend=1.0)
    assert one == two == [1, -1, -3, -5, -7, -9, -11, -13, -15, -17]


def test_overlap_of_one_step_blend_half() -> None:
    """Fragment 0 read at step 2: Δ = 4, Θ = −7; at step 3 θ = −5, ← (−5 − 7)/2 = −6.
    Read at step 8: θ = −16, Δ = −7 + 16 = 9, Θ = −25; at step 9 θ = −18, ← −21.5.
    Fragment 1 read at step 5: Δ = 10, Θ = −19; at step 6 θ = −11, ← −15."""
    one, two = histories(overlap=1, adopt="blend", blend=0.5)
    assert one == [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5]
    assert two == [1, -1, -3, -5, -7, -9, -15, -17, -19, -21]


def test_overlap_of_one_step_blend_one() -> None:
    one, two = histories(overlap=1, adopt="blend", blend=1.0)
    assert one == two == [1, -1, -3, -5, -7, -9, -11, -13, -15, -17]


@pytest.mark.parametrize("latency_s", [0.0, 0.1])
def test_blend_one_still_moves_the_global_model(latency_s: float) -> None:
    """Fragment 0: Θ = −11 after step 3; at step 9 Δ = −11 + 17 = 6, Θ = −23."""
    world = World(
        learners=2,
        fragments=2,
        sync_every=6,
        synchronous=True,
        outer_lr=2.0,
        gradient=lambda t: 2.0,
        overlap=0,
        adopt="blend",
        blend=1.0,
        latency_s=latency_s,
    )
    world.run_until(round=3)
    assert world.theta[0] == -23
