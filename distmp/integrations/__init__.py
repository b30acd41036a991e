"""distmp inside of other frameworks."""
