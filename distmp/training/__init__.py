"""The trainer: builds a run from its configuration, and runs, stops, resumes and restarts it."""
