"""Telemetry of a run: step records, the console, time and memory."""
