"""Recognizes files that hold text or have a header, which would be read as wrong token ids."""

from __future__ import annotations

import codecs
from pathlib import Path

import numpy as np

from distmp.errors import ConfigError

_TOKENIZE = "run `distmp data tokenize`, and set {setting} to the folder that it writes"
# First bytes of a file: what it is, and what to do. They are long enough that token ids do not
# begin with them by chance.
_HEADERS = {
    b"PAR1": ("a parquet file", _TOKENIZE),
    b"\x1f\x8b\x08": ("a gzip file", f"decompress it, {_TOKENIZE}"),
    b"PK\x03\x04": ("a zip file", "write ids without a header, such as by numpy's `tofile`"),
    b"\x93NUMPY": ("a numpy file with a header", "write its ids by `tofile` instead of `save`"),
}
_TEXT_SUFFIXES = (".txt", ".md", ".json", ".jsonl", ".csv", ".tsv", ".html", ".xml", ".yaml", ".py")
_READ_BYTES = 2**16
_CONTROL_CHARACTERS = frozenset(map(chr, [*range(32), 127])) - frozenset("\t\n\v\f\r\b\x1b")


def refuse_other_formats(path: Path, dtype: str, setting: str) -> None:
    """Refuse a file that holds text, or that has a header.

    Ignores files that cannot be read.

    Args:
        path: The file.
        dtype: numpy name of the type of an id. Text may be ids of uint8.
        setting: Name of the setting that holds the path, for error messages.

    Raises:
        ConfigError: With what the file is, and what to do.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            begin = file.read(_READ_BYTES)
    except OSError:
        return
    for header, (kind, advice) in _HEADERS.items():
        if begin.startswith(header):
            _refuse(path, setting, f"is {kind}, not token ids", advice)
    if np.dtype(dtype).itemsize > 1 and (path.suffix in _TEXT_SUFFIXES or _is_text(begin)):
        _refuse(path, setting, "is text, not token ids", _TOKENIZE)


def _refuse(path: Path, setting: str, problem: str, advice: str) -> None:
    raise ConfigError(setting, str(path), f"{problem}; {advice.format(setting=setting)}")


def _is_text(begin: bytes) -> bool:
    """Return whether the first bytes of a file are text in UTF-8.

    Token ids almost never are: both bytes of each 16-bit id would have to be printable or
    white space, and text has no byte of 0, which wider ids have.
    """
    try:
        # Only the end of the file has to be the end of a character.
        decoder = codecs.getincrementaldecoder("utf-8")()
        text = decoder.decode(begin, final=len(begin) < _READ_BYTES)
    except UnicodeDecodeError:
        return False
    return bool(text) and _CONTROL_CHARACTERS.isdisjoint(text)
