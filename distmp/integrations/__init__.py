"""distmp in other frameworks."""
