"""Prints the report of an audit, and exits with its code: `python -m distmp.testing FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from distmp.testing.auditing import AuditReport


def main(arguments: list[str]) -> int:
    """Print a report; return 0 if the gradient is right, 1 if wrong, 2 if it is not decided."""
    try:
        report = AuditReport(**json.loads(Path(arguments[0]).read_text()))
        sys.stdout.write(f"{report}\n")
    except (IndexError, OSError, TypeError, ValueError) as error:
        sys.stderr.write(f"usage: python -m distmp.testing FILE, the JSON of a report: {error}\n")
        return 2
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
