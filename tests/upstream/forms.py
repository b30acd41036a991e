"""The two forms of a script: with the upstream package alone, and with distmp. See README.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path

_MARK = re.compile(r"^( *)# distmp( adds)?: (.+)$")


def with_distmp(text: str) -> tuple[str, int]:
    """Return the form of a script with distmp, and the number of lines that distmp changes.

    Raises:
        ValueError: If a mark is not followed by the line of code that it replaces.
    """
    lines: list[str] = []
    changed = 0
    remaining = iter(text.splitlines())
    for line in remaining:
        mark = _MARK.match(line)
        if mark is None:
            lines.append(line)
            continue
        indent, adds, code = mark.groups()
        replaced = "" if adds else next(remaining, "").strip()
        if not adds and (not replaced or replaced.startswith("#")):
            raise ValueError(f"nothing to replace below {line!r}")
        lines.append(f"{indent}{code}")
        changed += 1
    return "\n".join(lines) + "\n", changed


if __name__ == "__main__":
    sys.stdout.write(with_distmp(Path(sys.argv[1]).read_text())[0])
