"""The page on Muon agrees with the code."""

from __future__ import annotations

import re

import yaml

from benchmarks.figures import ROOT
from distmp.config import RunConfig
from distmp.optim.muon import NOT_HIDDEN
from distmp.optim.owners import ROUND_ELEMENTS
from distmp.utils.settings import from_mapping

PAGE = (ROOT / "docs" / "muon.md").read_text()


def test_the_settings_load_with_their_defaults() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    config = from_mapping(RunConfig, yaml.safe_load(text))
    assert config.optim == type(config.optim)("muon", options=config.optim.options)
    assert config.optimizer_factory is not None


def test_names_and_sizes_are_those_of_the_code() -> None:
    sentence = PAGE.partition("Without `adamw`")[2].partition("count as embeddings")[0]
    assert set(re.findall(r"`([a-z.]+)`", sentence)) == {
        pattern.strip("*") for pattern in NOT_HIDDEN
    }
    assert ROUND_ELEMENTS == 2**24
    assert "2^24 elements (64 MiB in FP32)" in " ".join(PAGE.split())
