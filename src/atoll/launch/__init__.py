"""Starts and supervises the processes of a run."""
