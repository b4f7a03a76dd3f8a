"""The copy of a run directory in an object store (docs/adr/0033)."""
