"""The rules of a learner, which its courier runs. Begin with machine.py."""
