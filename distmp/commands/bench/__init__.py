"""`distmp bench`: measurements of the user's own run."""
