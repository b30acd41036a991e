"""`distmp bench`: benchmarks of the user's run."""
