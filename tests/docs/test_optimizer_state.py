"""The page on optimizer state agrees with the code."""

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
from distmp.optim.settings import STATES, OptimizerConfig
from distmp.precision import policy
from distmp.utils.settings import from_mapping
from tests.docs.test_troubleshooting import is_in_the_code

PAGE = (ROOT / "docs" / "optimizer-state.md").read_text()
BYTES = re.findall(r"^\| `(\S+)` \| (\S+) \| (.+) \| (\d) \| (\d) \| (\d+) \|$", PAGE, re.MULTILINE)
CHECKS = re.findall(r"^\| (.+) \| `(.+)` \| \[(\w+)\]\(\.\./(\S+)\) \|$", PAGE, re.MULTILINE)


def test_the_settings_load() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    config = from_mapping(RunConfig, yaml.safe_load(text))
    assert policy(config.precision.policy).stochastic_rounding
    assert config.optim.state == "fp8"
    config.check_names()
    assert all(f"{state}" in text.partition("# ")[2] for state in STATES)


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
    assert (len(BYTES), len(CHECKS)) == (5, 4)
    text = " ".join(PAGE.split())
    assert f"for each block of {BLOCK} elements" in text
    assert f"with {BLOCK} elements per block" in text
    assert f"take {4 / BLOCK} bytes more" in text


@pytest.mark.parametrize("row", CHECKS)
def test_a_message_is_in_the_code_and_its_test_in_the_tests(row: tuple[str, ...]) -> None:
    _, message, test, path = row
    assert is_in_the_code(message)
    assert re.search(rf"^def {test}\(", (ROOT / path).read_text(), flags=re.MULTILINE)
