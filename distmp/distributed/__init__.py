"""Ranks: who they are, how they reach each other, and how they act together."""
