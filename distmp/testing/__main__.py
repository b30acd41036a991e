"""Prints reports of audits, and exits with the code of the worst.

The code is 1 if a gradient is wrong, 3 if a file has no report, 2 if something is not decided, and
otherwise 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from distmp.testing.auditing import AuditReport
from distmp.utils.annotations import check_types

_WORST_FIRST = (1, 3, 2, 0)


def main(arguments: list[str] | None = None) -> int:
    """Print reports; return the worst code."""
    parser = argparse.ArgumentParser("python -m distmp.testing", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSON of a report")
    return min(map(_printed, parser.parse_args(arguments).files), key=_WORST_FIRST.index)


def _printed(file: str) -> int:
    try:
        report = AuditReport(**json.loads(Path(file).read_text()))
        check_types(report)
        text = f"{report}\n"
    except (OSError, TypeError, ValueError, RecursionError) as error:
        sys.stderr.write(f"{file} is not the report of an audit: {error}\n")
        return 3
    sys.stdout.write(text)
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
