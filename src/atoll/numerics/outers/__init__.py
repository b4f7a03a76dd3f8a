"""Outer optimizers, a module each. A module has `make(lr, momentum) -> OuterOptimizer`, as outer.py describes it."""
