"""What a run trains: the default transformer, its loss, and models by import path."""
