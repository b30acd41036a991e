"""`distmp report`: write a self-contained HTML file about a run."""
