"""Each reference to a note in the code, such as those on streams, leads to one note."""

from __future__ import annotations

import re
from collections import Counter

from tests.docs.test_names import SOURCES

_NAME = re.compile(r"Note \[([^\]]+)\]")


def test_each_note_that_is_referenced_is_defined_once() -> None:
    defined: Counter[str] = Counter()
    referenced: set[str] = set()
    for source in SOURCES.values():
        defined.update(re.findall(r"^# Note \[(.+)\]$", source, re.MULTILINE))
        # A reference may continue on the next line, of a comment too.
        referenced.update(_NAME.findall(re.sub(r"\n\s*#?\s*", " ", source)))
    assert referenced == set(defined)
    assert set(defined.values()) == {1}
