"""What a run will store, compute, send and need, before it runs: `distmp explain`."""
