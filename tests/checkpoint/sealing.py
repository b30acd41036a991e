"""Checkpoints whose checksums say that everything is right, whatever is in their files."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from distmp.checkpoint import manifest
from distmp.checkpoint.manifest import STATE_FILE, FileSum


def seal(path: Path) -> None:
    """List the files of a checkpoint anew, as somebody would who means to deceive."""
    state = json.loads((path / STATE_FILE).read_text())
    files = {
        file.name: FileSum(file.stat().st_size, zlib.crc32(file.read_bytes()))
        for file in path.iterdir()
        if file.is_file() and file.name != STATE_FILE
    }
    (path / STATE_FILE).write_bytes(manifest.encode(state["step"], state["numbers"], files))


def make_old(path: Path) -> None:
    """Make a checkpoint as the first version of distmp wrote them, without checksums."""
    state = json.loads((path / STATE_FILE).read_text())
    old = {"format": 1, "step": state["step"], "numbers": state["numbers"]}
    (path / STATE_FILE).write_text(json.dumps(old, indent=2) + "\n")
