"""The page on optimizers agrees with the code."""

from __future__ import annotations

import re

import torch
import yaml

from benchmarks.figures import ROOT
from distmp.config import RunConfig
from distmp.optim.muon import is_hidden
from distmp.precision import policy
from distmp.utils.settings import from_mapping

PAGE = (ROOT / "docs" / "optimizers.md").read_text()
MUON, ADAMW = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)


def test_muon_settings_load_with_defaults() -> None:
    config = from_mapping(RunConfig, yaml.safe_load(MUON))
    assert config.optim == type(config.optim)("muon", options=config.optim.options)
    config.check_names()


def test_adamw_names_on_page_agree_with_code() -> None:
    names = PAGE.partition("Without `adamw`")[2].partition("do too")[0]
    anywhere, outside = map(_in_backticks, names.split("Outside of numbered blocks"))
    matrix = torch.zeros(2, 2)
    assert len(anywhere) == 11
    assert len(outside) == 5
    for name in (*anywhere, *outside):
        assert not is_hidden(f"model.{name}.weight", matrix), name
        assert is_hidden(f"model.layers.0.{name}.weight", matrix) == (name in outside), name


def test_policy_on_page_rounds_stochastically() -> None:
    config = from_mapping(RunConfig, yaml.safe_load(ADAMW))
    assert policy(config.precision.policy).stochastic_rounding
    config.check_names()


def _in_backticks(text: str) -> list[str]:
    return re.findall(r"`([a-z_]+)`", text)
