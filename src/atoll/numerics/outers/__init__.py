"""Outer optimizers, a module each. A module has `make(lr, momentum) -> OuterOptimizer`, as outer.py describes it; one
that makes no `UpdatingOptimizer` cannot be used with a lossy version codec."""
