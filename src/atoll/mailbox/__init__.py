"""Shared memory between a learner and its courier, and the small messages that go with it. No torch."""
