"""Subcommands of `distmp`, one module or package for each."""
