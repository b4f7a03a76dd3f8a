"""Other libraries' training loops, on the public face of Atoll. Each module imports its library itself, so nothing of
Atoll imports these."""
