"""The subcommands of `distmp`, and what each of them needs."""
