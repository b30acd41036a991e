"""The page on migrating has a block for each way; test_blocks.py runs them."""

from __future__ import annotations

import dataclasses
import re

from benchmarks.figures import ROOT
from distmp._moved import MOVED
from distmp.config import RunConfig
from distmp.engine.spike_check import DivergenceConfig

PAGE = (ROOT / "docs" / "migrating.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_page_has_a_block_for_each_way() -> None:
    assert len(BLOCKS) == 8
    assert PAGE.count("\nBefore:\n") == 6


def test_renamed_paths_and_settings_are_those_of_the_code() -> None:
    table = PAGE.partition("| former | current |")[2]
    named = re.findall(r"`(distmp\.[\w.]+)`", "".join(re.findall(r"^\| ([^|]*) \|", table, re.M)))
    assert named
    assert set(named) <= MOVED.keys()
    for former in named:
        assert f"`{MOVED[former]}`" in table or MOVED[former].startswith("distmp.commands.")
    for fields, prefix in ((RunConfig, ""), (DivergenceConfig, "divergence.")):
        for field in dataclasses.fields(fields):
            if "formerly" in field.metadata:
                assert f"`{prefix}{field.metadata['formerly']}`" in table
                assert f"`{prefix}{field.name}`" in table
