from __future__ import annotations

from atoll.protocol.limits import FEW, Budget, Budgets


def test_so_much_at_once_and_so_much_a_second() -> None:
    budget = Budget(100, 10, now=0.0)
    assert budget.take(0.0, 60) and budget.take(0.0, 40) and not budget.take(0.0, 1)
    assert not budget.take(1.0, 11) and budget.take(1.0, 10)
    assert budget.take(1000.0, 100) and not budget.take(1000.0, 1), "no more than the burst is ever saved up"


def test_a_clock_that_goes_back_gives_nothing_and_takes_nothing() -> None:
    budget = Budget(100, 10, now=50.0)
    assert budget.take(50.0, 100) and not budget.take(40.0, 1)
    assert budget.take(41.0, 10)


def test_what_is_spent_beyond_it_must_be_earned_first() -> None:
    budgets = Budgets(10, 1)
    assert budgets.any_left("a", 0)
    budgets.spend("a", 0, 5)
    assert budgets.any_left("a", 0)
    budgets.spend("a", 0, 25)
    assert not budgets.any_left("a", 20) and budgets.any_left("a", 20.1) and budgets.any_left("b", 0)


def test_each_has_its_own() -> None:
    budgets = Budgets(10, 1)
    assert budgets.take("a", 0, 10) and not budgets.take("a", 0, 1)
    assert budgets.take("b", 0, 10)


def test_who_has_all_of_it_again_is_forgotten_and_who_has_not_is_not() -> None:
    budgets = Budgets(10, 1)
    assert budgets.take("spent", 100, 10)
    for number in range(10 * FEW):
        assert budgets.take(number, 100, 0)
    assert len(budgets._of) <= 2 * FEW
    assert not budgets.take("spent", 100, 1)
