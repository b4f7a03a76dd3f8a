"""Wait for more learners inside the slack that the overlap leaves."""


def wait_s(grace_s: float, late_s: float) -> float:
    return max(grace_s, late_s)
