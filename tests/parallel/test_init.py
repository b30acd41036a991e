from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from distmp.distributed.world import World
from distmp.errors import ConfigError
from distmp.parallel import ParallelConfig
from distmp.parallel.build_strategy import build_strategy, resolve_strategy
from distmp.parallel.replicated import Replicated
from distmp.parallel.settings import STRATEGIES
from distmp.precision import policy
from tests.optim.test_optimizer_tensors import Own
from tests.ranks import ranks
from tests.reference import make_engine, make_model


def world(size: int) -> World:
    return World(0, size, torch.device("cpu"), None)


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("auto", 1, "single"),
        ("auto", 2, "ddp"),
        ("single", 1, "single"),
        ("ddp", 4, "ddp"),
        ("fsdp", 2, "fsdp"),
    ],
)
def test_strategy_auto_is_resolved(name: str, size: int, expected: str) -> None:
    assert resolve_strategy(name, world(size)) == expected


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("fdsp", 1, r"strategy = 'fdsp': did you mean 'fsdp'\?"),
        ("full_shard", 1, r"did you mean 'fsdp'\?"),
        ("zero3", 1, r"did you mean 'fsdp'\?"),
        ("zero", 1, f"choose one of {', '.join(sorted(STRATEGIES))}"),
        ("single", 2, r"strategy = 'single': is for one rank, but 2 were started; use 'ddp'"),
        (
            "ddp",
            1,
            r"strategy = 'ddp': needs several ranks, but only one process was started; .*torchrun",
        ),
        ("fsdp", 1, r"strategy = 'fsdp': needs several ranks, but only one process was started"),
    ],
)
def test_incompatible_options_are_refused(name: str, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_strategy(name, world(size))


def test_single_is_replicated() -> None:
    strategy = build_strategy("single", make_model(), policy("fp32"), world(1))
    assert isinstance(strategy, Replicated)


@ranks(1)
def test_fsdp() -> None:
    from distmp.parallel.fsdp import FullySharded

    strategy = build_strategy("fsdp", make_model(), policy("fp32"), World.current("cpu"))
    assert isinstance(strategy, FullySharded)


@ranks(2)
def test_only_rank_0_warns() -> None:
    class Records(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    warnings: list[str] = []
    logging.getLogger("distmp").addHandler(Records(logging.WARNING))
    make_engine(parallel=ParallelConfig(compile="model"))
    build_strategy("ddp", torch.compile(make_model()), policy("fp32"), World.current("cpu"))
    make_engine(strategy="ddp", shard_optimizer=True, optimizer=Own)
    assert len(warnings) == (3 if dist.get_rank() == 0 else 0), warnings


@pytest.mark.slow
def test_what_fsdp_needs_is_not_imported_without_it() -> None:
    code = """
import sys, torch
before = set(sys.modules)
import distmp
from distmp.distributed.world import World
from distmp.parallel.build_strategy import build_strategy
build_strategy("single", torch.nn.Linear(1, 1), distmp.policy("bf16"), World.current("cpu"))
print([name for name in sorted(set(sys.modules) - before) if "fsdp" in name
       or (name.startswith("torch.") and "_tensor" in name)
       or name in ("tyro", "rich", "matplotlib", "yaml", "accelerate")])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
