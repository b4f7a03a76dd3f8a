"""What a run tells about itself: one schema of events, one of its state."""
