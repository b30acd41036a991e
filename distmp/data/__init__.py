"""What a run trains on: sources, the order of samples, and microbatches for each rank."""

IGNORED = -100
"""Target that carries no loss and no weight (the default `ignore_index` of torch)."""
