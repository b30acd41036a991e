"""`distmp calibrate --formats`: errors of narrow products on a run, and a policy below an error."""
