"""The relay: stands between the learners of one region and the syncer, and has no say (docs/adr/0032)."""
