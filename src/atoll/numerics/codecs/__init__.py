"""Codecs, a module each: how contributions travel. A module has `make(threads) -> Codec`, as codec.py describes it."""
