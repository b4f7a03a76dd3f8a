"""A run once more, from its tape: the same scripts, the same orders at the same steps, every version compared."""
