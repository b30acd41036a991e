"""Ranks: environment, process group, collectives, and what all ranks do together."""
