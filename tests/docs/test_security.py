"""The names on the security page are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.figures import ROOT
from distmp.launcher import rendezvous
from distmp.masking import is_secret

PAGE = (ROOT / "docs" / "security.md").read_text()


def test_what_the_page_quotes() -> None:
    message = "the state in the rendezvous store is not torchrun's"
    assert message in PAGE
    assert message in Path(rendezvous.__file__).read_text()
    [names] = re.findall(r"names that end with ((?:`\w+`,? ?)+)", PAGE)
    [contained] = re.findall(r"or contain ((?:`\w+`,? ?)+)", PAGE)
    for name in re.findall(r"`(\w+)`", names):
        assert is_secret(f"my_{name}"), name
    for name in re.findall(r"`(\w+)`", contained):
        assert is_secret(f"{name}_of_mine"), name
