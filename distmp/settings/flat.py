"""Settings by their dotted names, and a hash of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def flat(values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return nested settings under their dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{section}{name}."))
        else:
            found[f"{section}{name}"] = value
    return found


def digest(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of settings, the same on every machine and in any order of names."""
    text = json.dumps(flat(values), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
