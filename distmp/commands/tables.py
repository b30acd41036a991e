"""Tables of text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


def text_table(rows: Sequence[Sequence[str]], right: Collection[int]) -> Iterator[str]:
    """Yield the lines of a table.

    Args:
        rows: The cells; all rows have the same number of them.
        right: Indices of the columns that are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def counted(number: int, what: str) -> str:
    """Return a number and what it counts, such as "1 rank" or "3 batches"."""
    ending = "" if number == 1 else "es" if what.endswith("ch") else "s"
    return f"{number} {what}{ending}"
