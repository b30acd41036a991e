"""Checkpoints: whole or absent, loaded without running code, at any world size."""
