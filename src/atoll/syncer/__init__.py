"""The syncer process: the rules of protocol.syncer, the arithmetic of numerics and the wires of fabric. No torch."""
