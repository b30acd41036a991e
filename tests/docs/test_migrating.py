"""The page on migrating has a block for each way; test_blocks.py runs them."""

from __future__ import annotations

import re

from benchmarks.figures import ROOT

PAGE = (ROOT / "docs" / "migrating.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_page_has_a_block_for_each_way() -> None:
    assert len(BLOCKS) == 4
    assert PAGE.count("\nBefore:\n") == 3
