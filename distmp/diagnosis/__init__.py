"""Explains overflows: replays the step and finds rank, microbatch, parameter and module."""
