"""Starts the ranks of a run on one machine, over ssh, or under a scheduler."""
