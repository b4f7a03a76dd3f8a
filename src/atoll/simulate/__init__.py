"""Worlds of virtual time for the shipped state machines: the fault simulator."""
