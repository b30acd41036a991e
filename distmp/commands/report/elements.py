"""HTML elements of the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of escaped texts; without a head if all of its texts are empty."""

    def row(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    top = f"<thead>{row(head, 'th')}</thead>" if any(head) else ""
    return f'<div class="wide"><table>{top}<tbody>{body}</tbody></table></div>'
