"""Tables of the kept results, as Markdown: a function for each benchmark, by subject."""
