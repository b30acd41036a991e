"""Where the time and memory of chosen steps went: traces, and a summary over all ranks."""
