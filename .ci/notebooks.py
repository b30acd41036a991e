"""Writes the notebooks of docs/labs/ from the scripts of examples/labs/: `make notebooks`.

Notebooks have no outputs; `make docs` executes them. The comment above a figure is the alternative
text of its picture.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jupytext
import nbformat

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "examples" / "labs").glob("*.py"))
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def main() -> int:
    for script in SCRIPTS:
        target(script).write_text(notebook(script))
    return 0


def target(script: Path) -> Path:
    """Return the path of a script's notebook."""
    return ROOT / "docs" / "labs" / f"{script.stem}.ipynb"


def notebook(script: Path) -> str:
    """Return the notebook of a script in jupytext's percent format."""
    found = jupytext.read(script)
    found.metadata = nbformat.from_dict({"kernelspec": KERNEL})
    for number, cell in enumerate(found.cells):
        cell.id = f"cell-{number}"  # jupytext's are random
        for comment in re.findall(r"((?:^# .*\n)+)figure, ", cell.source, re.MULTILINE):
            alt = " ".join(comment.replace("# ", "").split())
            cell.metadata["mystnb"] = {"image": {"alt": alt}}
    return f"{nbformat.writes(found)}\n"


if __name__ == "__main__":
    sys.exit(main())
