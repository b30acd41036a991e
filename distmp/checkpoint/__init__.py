"""Checkpoints: written atomically, loaded at any world size and without running code."""
