"""Benchmarks that measure alternatives side by side, run with `python -m benchmarks.NAME`."""
