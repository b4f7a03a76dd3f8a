"""Data-parallel baselines, and `atoll compare`: each method under the same plan of faults."""
