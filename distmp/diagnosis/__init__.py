"""Explains an overflow: replays the step and attributes it to a rank, a parameter and a module."""
