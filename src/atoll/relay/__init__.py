"""The relay: stands between the learners of one region and the syncer, and decides nothing (docs/adr/0032)."""
