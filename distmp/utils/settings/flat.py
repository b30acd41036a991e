"""Settings by their dotted names, and a hash of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any


def flat(
    values: Mapping[str, Any], leaves: Collection[str] = (), section: str = ""
) -> dict[str, Any]:
    """Return nested settings under their dotted names.

    Args:
        values: Sections, settings and sections of sections.
        leaves: Dotted names of settings whose values are mappings.
        section: Prefix of the names.
    """
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{section}{key}"
        if isinstance(value, Mapping) and value and name not in leaves:
            flattened.update(flat(value, leaves, f"{name}."))
        else:
            flattened[name] = value
    return flattened


def digest(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of settings; it does not depend on the machine or the order of names."""
    text = json.dumps(flat(values), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
