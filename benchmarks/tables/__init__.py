"""Tables of the saved results as Markdown, with one function per benchmark."""
