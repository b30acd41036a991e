"""`distmp data tokenize`: turns text into token files."""
