"""Bytes between processes: messages on a control channel, fragments as bodies beside it. Knows no rule of rounds."""
