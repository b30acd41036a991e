"""`distmp explain`: predicts dtypes, memory and communication of a run before it starts."""
