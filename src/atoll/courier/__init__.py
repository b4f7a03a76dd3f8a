"""The small process beside every learner that does all its talking. No torch."""
