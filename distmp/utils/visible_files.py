"""Lists the files below a folder."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from distmp.errors import ConfigError


def visible_files(
    folder: Path, setting: str, skipped_folders: Collection[str] = ()
) -> Iterator[str]:
    """Yield the relative paths of all regular files below a folder, with forward slashes.

    Hidden names are skipped, links to folders are not followed.

    Args:
        folder: The folder.
        setting: Name of the setting that holds the folder, for error messages.
        skipped_folders: Names of folders to skip.

    Raises:
        ConfigError: If a folder cannot be listed.
    """

    def unreadable(error: OSError) -> None:
        raise ConfigError(
            setting, str(folder), f"cannot list {error.filename}: {error.strerror}"
        ) from error

    for parent, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [f for f in folders if f not in skipped_folders and not f.startswith(".")]
        for name in names:
            path = os.path.join(parent, name)
            # Broken links and sockets are skipped, and are not the user's mistake.
            if not name.startswith(".") and os.path.isfile(path):
                yield os.path.relpath(path, folder).replace(os.sep, "/")
