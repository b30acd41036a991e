"""Runs on several simulated hosts that are killed, cut off and restarted."""
