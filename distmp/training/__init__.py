"""The trainer: builds a run from its configuration, trains, stops, resumes and restarts it."""
