"""Training data: sources, the order of samples, and microbatches for each rank."""

IGNORED = -100
"""Target with loss and weight zero (the default `ignore_index` of torch)."""
