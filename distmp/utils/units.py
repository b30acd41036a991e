"""Formats numbers and tables for messages."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence


def per_second(unit: str) -> str:
    """Return the unit of a throughput: "tok/s", "samples/s", ...

    Args:
        unit: What is counted, in the singular, such as "token".
    """
    return "tok/s" if unit == "token" else f"{unit}s/s"


def quantity(value: float) -> str:
    """Return three significant digits and a decimal prefix: 12345 -> "12.3k"; 5 characters."""
    if abs(value) < 1:
        return f"{value:.2f}"
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5:
            return f"{value:#.3g}".rstrip(".") + prefix
        value /= 1000
    return "inf" if value > 0 else "nan"


def bytes_text(value: float) -> str:
    """Return bytes with a binary prefix: 1288490188 -> "1.2 GiB"; up to 8 characters."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1023.5 and len(units) > 1:
        value /= 1024
        del units[0]
    decimals = 1 if value < 99.95 and units[0] != "B" else 0
    return f"{value:.{decimals}f} {units[0]}"


def duration(seconds: float) -> str:
    """Return minutes, hours or days: "3:41", "1:02:03", "2d 03h"; up to 8 characters."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}h" if days < 100 else f"{days}d"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def scale_text(scale: float) -> str:
    """Return a loss scale: powers of two from 1024 up and below 1 as "2^16", others as a number."""
    mantissa, exponent = math.frexp(scale)
    if mantissa == 0.5 and not 1 <= scale < 1024:
        return f"2^{exponent - 1}"
    return f"{scale:.4g}"


def text_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> Iterator[str]:
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
