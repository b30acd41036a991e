"""Writes the weights in a checkpoint in formats that other programs read."""
