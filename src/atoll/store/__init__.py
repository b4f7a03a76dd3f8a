"""Bytes at rest: the one place that writes the files of a run."""
