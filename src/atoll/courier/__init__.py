"""The small process beside every learner that does all its networking. No torch."""
