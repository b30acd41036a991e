"""Prints reports of audits, and exits with the code of the worst.

The code is 1 if a gradient is wrong, 3 if a file has no report, 2 if something is not decided, and
otherwise 0.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from distmp.testing.auditing import AuditReport

_USAGE = "usage: python -m distmp.testing FILE..., with the JSON of reports\n"
_WORST_FIRST = (1, 3, 2, 0)


def main(arguments: list[str]) -> int:
    """Print reports; return the worst code, and 2 if there is no argument."""
    if not arguments:
        sys.stderr.write(_USAGE)
        return 2
    if {"-h", "--help"} & {*arguments}:
        sys.stdout.write(f"{_USAGE}\n{__doc__}")
        return 0
    return min(map(_printed, arguments), key=_WORST_FIRST.index)


def _printed(file: str) -> int:
    try:
        report = _report(json.loads(Path(file).read_text()))
    except (OSError, ValueError, RecursionError) as error:
        sys.stderr.write(f"{file} is not the report of an audit: {error}\n")
        return 3
    sys.stdout.write(f"{report}\n")
    return report.exit_code


def _report(found: Any) -> AuditReport:
    if not isinstance(found, dict):
        raise ValueError(f"it has a {type(found).__name__} instead of fields")
    if others := found.keys() ^ {field.name for field in fields(AuditReport)}:
        raise ValueError(f"fields are missing or unknown: {', '.join(sorted(others))}")
    pairs, undecided, calls = found["mismatches"], found["undecided"], found["collectives"]
    valid = {
        "ranks": type(found["ranks"]) is int,
        "steps": type(found["steps"]) is int,
        "mismatches": _is_list(pairs) and all(_is_list(p, str) and len(p) == 2 for p in pairs),
        "undecided": _is_list(undecided, str),
        "collectives": isinstance(calls, dict) and _is_list([*calls.values()], int),
    }
    for name in [name for name in valid if not valid[name]]:
        raise ValueError(f"{name} = {json.dumps(found[name])[:100]} has another type")
    return AuditReport(**found)


def _is_list(value: Any, of: type = object) -> bool:
    return isinstance(value, list) and all(isinstance(each, of) for each in value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
