"""Prints the report of an audit.

The exit code is 1 if the gradient is wrong, 2 if this is not decided, 3 if there is no
report, and otherwise 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from distmp.testing.auditing import AuditReport
from distmp.utils.annotations import check_types


def main(arguments: list[str] | None = None) -> int:
    """Print a report; return the exit code."""
    parser = argparse.ArgumentParser("python -m distmp.testing", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="JSON of a report")
    try:
        file = parser.parse_args(arguments).file
        report = AuditReport(**json.loads(file.read_text()))
        check_types(report)
    except SystemExit as end:  # argparse exits with 2
        return 3 if end.code else 0
    except (OSError, TypeError, ValueError, RecursionError) as error:
        sys.stderr.write(f"{file} is not the report of an audit: {error}\n")
        return 3
    sys.stdout.write(f"{report}\n")
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
