"""Tests and benchmarks for a GPU, in slices of at most 9 minutes: `python -m benchmarks.gpu`."""
