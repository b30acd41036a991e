"""Prints what a change of structure must not change, a fact per line, to be compared with `diff`.

    make -s behaviour > build/before.txt    # on the state before, on the same machine
    make -s behaviour | diff build/before.txt -

It prints the public API, the help of every command, the texts of messages that tests quote, and
digests of the final weights of 40 short runs over policies, strategies and ranks. These weights
depend on the processor.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import inspect
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import distmp  # noqa: E402
from distmp import cli  # noqa: E402
from distmp.parallel.settings import ParallelConfig, ShardingConfig  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from tests.reference import (  # noqa: E402
    CLASSES,
    FOUR_RANKS,
    INPUTS,
    ONE_RANK,
    TWO_RANKS,
    Block,
    Classifier,
    make_engine,
    train,
)

POLICIES = (
    "fp32",
    "bf16",
    "bf16-autocast",
    "bf16-pure",
    "fp16",
    "fp16-autocast",
    "fp16-static",
    "fp8",
    "fp8-rowwise",
    "mxfp8",
)
HYBRID = ParallelConfig(ShardingConfig(shard_size=2))
# Options of the engine, and the microbatch sizes of each step by rank.
RUNS: dict[str, tuple[dict[str, Any], Any]] = {
    "single": ({"strategy": "single"}, ONE_RANK),
    "ddp": ({"strategy": "ddp", "shard_optimizer": True}, TWO_RANKS),
    "fsdp": ({"strategy": "fsdp"}, TWO_RANKS),
    "hsdp": ({"strategy": "hsdp", "parallel": HYBRID}, FOUR_RANKS),
}
STEPS = 4
WIDTH = 32  # 8-bit matmuls need multiples of 16


def main() -> int:
    for part in (api, commands, messages, weights):
        for line in part():
            print(line)
    return 0


def api() -> Iterator[str]:
    """Yield the public names with their signatures, and those of their public methods."""
    for name in sorted(distmp.__all__):
        value = getattr(distmp, name)
        yield f"distmp.{name}{_signature(value)}"
        if inspect.isclass(value):
            for member, inner in sorted(inspect.getmembers(value)):
                if not member.startswith("_"):
                    yield f"distmp.{name}.{member}{_signature(inner)}"


def commands() -> Iterator[str]:
    """Yield the help of every command."""
    for name, (module, _) in sorted(cli._SUBCOMMANDS.items()):
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            importlib.import_module(module).main(["--help"])
        yield from (
            f"distmp {name} --help: {line.rstrip()}" for line in text.getvalue().split("\n")
        )


def messages() -> Iterator[str]:
    """Yield the texts by which tests recognize messages."""
    found = {
        keyword.value.value
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "match" and isinstance(keyword.value, ast.Constant)
    }
    yield from (f"message: {text!r}" for text in sorted(map(str, found)))


def weights() -> Iterator[str]:
    """Yield a digest of the weights at the end of each short run."""
    for name, (_, sizes) in RUNS.items():
        for digests in run_ranks(_digests, len(sizes[0]), name)[:1]:
            yield from (f"weights of {name}, {policy}: {text}" for policy, text in digests.items())


def _digests(name: str) -> dict[str, str]:
    options, sizes = RUNS[name]
    return {policy: _digest(options, policy, sizes) for policy in POLICIES}


def _digest(options: dict[str, Any], policy: str, sizes: Any) -> str:
    try:
        engine = make_engine(**options, model=_model(), policy=policy, max_norm=1.0)
    except distmp.ConfigError as error:
        return f"refused, {error}"
    train(engine, STEPS, sizes)
    digest = hashlib.sha256()
    for tensor in engine.model.state_dict().values():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(whole.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = Classifier()
    model.first = nn.Linear(INPUTS, WIDTH)
    model.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
    model.head = nn.Linear(WIDTH, CLASSES, bias=False)
    return model


def _signature(value: object) -> str:
    try:
        return str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
