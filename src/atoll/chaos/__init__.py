"""Faults against real processes: plan.py says what happens when, inject.py does it, verdict.py judges the outcome."""
