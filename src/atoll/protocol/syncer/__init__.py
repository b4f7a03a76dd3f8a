"""The rules of the syncer: one state, and the rules that read and change it. Begin with machine.py."""
