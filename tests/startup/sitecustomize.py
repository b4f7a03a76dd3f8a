"""Python imports this at the start of every process that a test starts (tests/conftest.py names the folder)."""

import lean_torch
import left_out
import plain_loops

lean_torch.install()
plain_loops.install()
left_out.install()
