"""Codecs, a module each: how contributions travel. A module has `make() -> Codec`, as codec.py describes it."""
