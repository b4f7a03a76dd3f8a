"""Python imports this at the start of every process that a test starts (tests/conftest.py names the folder)."""

import lean_torch

lean_torch.install()
