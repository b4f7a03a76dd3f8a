"""Data-parallel training under the same faults as a run of Atoll: what `atoll compare` holds it against."""
