"""Models: the default transformer and its loss, Hugging Face models, models by import path."""
