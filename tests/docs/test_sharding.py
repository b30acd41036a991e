"""The page on sharded models agrees with the code."""

from __future__ import annotations

import dataclasses
import re
from typing import get_args

import yaml

from benchmarks.figures import ROOT
from distmp.config import RunConfig
from distmp.parallel.collective_order import ANSWER_SECONDS
from distmp.parallel.fsdp_setup import SHARE_OF_FREE_MEMORY
from distmp.parallel.settings import SHARDED_STRATEGIES, Accumulation, ShardingConfig
from distmp.training.strategy_choice import OPTIONS, SHARE
from distmp.utils.settings import from_mapping

PAGE = (ROOT / "docs" / "sharding.md").read_text()


def first_cells(head: str) -> list[str]:
    """Return what stands in backquotes at the beginning of the rows of a table."""
    table = PAGE.partition(f"| {head} |")[2].partition("\n\n")[0]
    return re.findall(r"^\| `([\w-]+)`", table, flags=re.MULTILINE)


def test_settings_table_is_complete_and_loads() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    values = yaml.safe_load(text)
    assert from_mapping(RunConfig, values).strategy == "hsdp"
    assert set(values["sharding"]) == {field.name for field in dataclasses.fields(ShardingConfig)}
    for name, default in dataclasses.asdict(ShardingConfig()).items():
        assert values["sharding"][name] == default or name in ("shard_size", "wrap")


def test_strategy_tables_are_complete() -> None:
    assert tuple(first_cells("strategy")) == SHARDED_STRATEGIES
    assert {"auto", *first_cells("`accumulate`")} == set(get_args(Accumulation))


def test_page_numbers_agree_with_code() -> None:
    assert "a quarter of the free memory" in PAGE
    assert SHARE_OF_FREE_MEMORY == 0.25
    assert "at most two minutes in which no rank that it waits for makes progress" in " ".join(
        PAGE.split()
    )
    assert ANSWER_SECONDS == 120


def test_automatic_strategy_agrees_with_code() -> None:
    section = PAGE.partition("## Automatic strategy")[2].partition("## Blocks")[0]
    ordered = re.findall(r"^\d\. (.*?)(?:, if .*)?$", section, flags=re.MULTILINE)
    assert tuple(entry.replace("`", "") for entry in ordered) == OPTIONS
    assert "half of the free memory" in " ".join(section.split())
    assert SHARE == 0.5
