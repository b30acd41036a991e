"""The formats that `distmp calibrate --formats` measures."""

from __future__ import annotations

from collections.abc import Sequence

from distmp.errors import ConfigError, nearest

# The presets with narrow products, the cheapest first.
FORMATS = ("nvfp4", "fp8", "mxfp8", "fp8-rowwise")
# Above the typical errors with 8 bits, which are 0.01 to 0.07.
MAX_ERROR = 0.08


def split_formats(formats: Sequence[str]) -> tuple[str, ...]:
    """Return the names in `fp8,mxfp8` or `fp8 mxfp8`, the cheapest format first.

    Raises:
        ConfigError: If a name is not one of `FORMATS`.
    """
    names = [name.strip() for words in formats for name in words.split(",")]
    for name in names:
        if name not in FORMATS:
            raise ConfigError("formats", name, nearest(name, FORMATS))
    return tuple(sorted(set(names), key=FORMATS.index))
