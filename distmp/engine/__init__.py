"""The engine: mixed-precision optimizer steps over all ranks, for any training loop."""
