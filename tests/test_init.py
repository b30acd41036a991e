from __future__ import annotations

import subprocess
import sys

import distmp
from tests.torchrun import environment

HEAVY = (
    "accelerate",
    "matplotlib",
    "rich",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "tyro",
)


def test_public_names_exist() -> None:
    assert sorted(distmp.__all__) == distmp.__all__
    assert all(hasattr(distmp, name) for name in distmp.__all__)


def test_importing_brings_nothing_heavy_that_torch_has_not_brought() -> None:
    program = (
        "import sys, torch; before = set(sys.modules); import distmp;"
        f"print([name for name in {HEAVY!r} if name in set(sys.modules) - before])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "[]"
