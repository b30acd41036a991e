"""The README in the metadata of the package: a package index shows it without the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)\s]+)\)")
_NOTE = (
    "\n\nThe pages that this text mentions are in the folder `docs/` of the source distribution.\n"
)


class ReadmeHook(MetadataHookInterface):
    """Sets the `readme` of the project."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the README, with links that work outside of the repository."""
        text = (Path(self.root) / "README.md").read_text()
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_index(text, source)}


def for_index(text: str, source: str | None) -> str:
    """Return a page without relative links.

    Args:
        text: The page, in Markdown.
        source: URL of the repository's files; without one, links become their text.
    """
    if source is None:
        return _RELATIVE_LINK.sub(r"\1", text).rstrip() + _NOTE
    return _RELATIVE_LINK.sub(rf"[\1]({source.rstrip('/')}/\2)", text)
