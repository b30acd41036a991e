"""Compares precision policies on a run: loss, time, loss scale, errors of formats."""
