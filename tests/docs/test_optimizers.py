"""The page on Muon and on optimizer state agrees with the code."""

from __future__ import annotations

import re

import pytest
import torch
import yaml
from torch import nn

from benchmarks.figures import ROOT
from distmp import Engine
from distmp.config import RunConfig
from distmp.optim.build import optimizer_factory
from distmp.optim.moments import BLOCK
from distmp.optim.muon import is_hidden
from distmp.optim.settings import STATES, OptimizerConfig
from distmp.precision import policy
from distmp.utils.settings import from_mapping

PAGE = (ROOT / "docs" / "optimizers.md").read_text()
BYTES = re.findall(r"^\| `(\S+)` \| (\S+) \| (.+) \| (\d) \| (\d) \| (\d+) \|$", PAGE, re.MULTILINE)


MUON, STATE = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_settings_of_muon_load_with_their_defaults() -> None:
    config = from_mapping(RunConfig, yaml.safe_load(MUON))
    assert config.optim == type(config.optim)("muon", options=config.optim.options)
    assert config.optimizer_factory is not None


def test_names_are_those_of_the_code() -> None:
    names = PAGE.partition("Without `adamw`")[2].partition("do too")[0]
    anywhere, outside = map(_in_backticks, names.split("Outside of numbered blocks"))
    matrix = torch.zeros(2, 2)
    assert len(anywhere) == 11
    assert len(outside) == 5
    for name in (*anywhere, *outside):
        assert not is_hidden(f"model.{name}.weight", matrix), name
        assert is_hidden(f"model.layers.0.{name}.weight", matrix) == (name in outside), name


def _in_backticks(text: str) -> list[str]:
    return re.findall(r"`([a-z_]+)`", text)


def test_the_settings_of_state_load() -> None:
    config = from_mapping(RunConfig, yaml.safe_load(STATE))
    assert policy(config.precision.policy).stochastic_rounding
    assert config.optim.state == "fp8"
    assert config.optimizer_factory is not None
    assert all(f"{state}" in STATE.partition("# ")[2] for state in STATES)


@pytest.mark.parametrize("row", BYTES)
def test_bytes_per_parameter(row: tuple[str, ...]) -> None:
    name, state, weights, first, second, total = row
    engine = Engine(
        nn.Linear(512, 512, bias=False),
        lambda module, batch: (module(batch).float().sum(), len(batch)),
        optimizer_factory(OptimizerConfig(state=None if state == "null" else state.strip("`"))),
        policy=name,
        strategy="single",
    )
    engine.step([torch.ones(1, 512)])
    uses, count = engine.tensors_by_use(), 512 * 512
    held = {tensor.data_ptr(): tensor for tensor in uses["parameters"] + uses["master weights"]}
    assert weights.removesuffix(" (master)") == " + ".join(
        str(tensor.nbytes // count) for tensor in held.values()
    )
    (found,) = engine.optimizer.state.values()
    assert found["exp_avg"].nbytes == int(first) * count
    assert found["exp_avg_sq"].nbytes == int(second) * count
    kept = sum(tensor.nbytes for tensor in [*held.values(), *uses["optimizer state"]])
    assert 0 <= kept / count - int(total) < 4 / BLOCK + 1e-3


def test_the_tables_and_the_sizes_of_blocks_are_complete() -> None:
    assert len(BYTES) == 5
    text = " ".join(PAGE.split())
    assert f"for each block of {BLOCK} elements" in text
    assert f"take {4 / BLOCK} bytes more" in text
