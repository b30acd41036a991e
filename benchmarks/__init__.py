"""Side-by-side measurements; each module is one command, `python -m benchmarks.NAME`."""
