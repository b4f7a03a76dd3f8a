"""What the demos, benchmarks and tests train: a small GPT on bytes of text. Uses Atoll's public face like any user.

`settings` alone may be imported without torch; everything else here is for training processes.
"""
