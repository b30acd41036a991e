"""The page on Muon agrees with the code."""

from __future__ import annotations

import re

import torch
import yaml

from benchmarks.figures import ROOT
from distmp.config import RunConfig
from distmp.optim.muon import is_hidden
from distmp.optim.owners import ROUND_ELEMENTS
from distmp.utils.settings import from_mapping

PAGE = (ROOT / "docs" / "muon.md").read_text()


def test_the_settings_load_with_their_defaults() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    config = from_mapping(RunConfig, yaml.safe_load(text))
    assert config.optim == type(config.optim)("muon", options=config.optim.options)
    config.check_names()


def test_names_and_sizes_are_those_of_the_code() -> None:
    names = PAGE.partition("Without `adamw`")[2].partition("do too")[0]
    anywhere, outside = map(_in_backticks, names.split("Outside of numbered blocks"))
    matrix = torch.zeros(2, 2)
    assert len(anywhere) == 11
    assert len(outside) == 5
    for name in (*anywhere, *outside):
        assert not is_hidden(f"model.{name}.weight", matrix), name
        assert is_hidden(f"model.layers.0.{name}.weight", matrix) == (name in outside), name
    assert ROUND_ELEMENTS == 2**24
    assert "2^24 elements (64 MiB in FP32)" in " ".join(PAGE.split())


def _in_backticks(text: str) -> list[str]:
    return re.findall(r"`([a-z_]+)`", text)
