"""Links and README in the metadata of the package: an index shows them without the repository.

The URL of the repository is the variable `DISTMP_SOURCE_URL`, see `make dist`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)\s]+)\)")
_NOTE = (
    "\n\nThe pages that this text mentions are in the folder `docs/` of the source distribution.\n"
)


class LinksHook(MetadataHookInterface):
    """Sets the `readme` and the `urls` of the project."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the URLs, and the README with links that work outside of the repository."""
        text = (Path(self.root) / "README.md").read_text()
        source = os.environ.get("DISTMP_SOURCE_URL", "").rstrip("/")
        files = f"{source}/blob/v{metadata['version']}" if source else None
        metadata["readme"] = {"content-type": "text/markdown", "text": for_index(text, files)}
        metadata["urls"] = urls(source, files) if files else {}


def urls(source: str, files: str) -> dict[str, str]:
    """Return the links that an index shows beside the description.

    Args:
        source: URL of the repository.
        files: URL of the repository's files at the tag of this version.
    """
    return {
        "Source": source,
        "Documentation": f"{files}/docs/index.md",
        "Changelog": f"{files}/CHANGELOG.md",
        "Issues": f"{source}/issues",
    }


def for_index(text: str, files: str | None) -> str:
    """Return a page without relative links.

    Args:
        text: The page, in Markdown.
        files: URL of the repository's files; without one, links become their text.
    """
    if files is None:
        return _RELATIVE_LINK.sub(r"\1", text).rstrip() + _NOTE
    return _RELATIVE_LINK.sub(rf"[\1]({files}/\2)", text)
