"""Every Python block of the README and of docs/ runs, alone and on two ranks that torchrun started.

Where a block takes steps with an engine, the weight of each is that of all ranks.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distmp.engine.engine import Engine
from distmp.engine.outcome import StepOutcome
from tests.marks import nightly
from tests.ports import reserved_port
from tests.ranks import run_ranks
from tests.reference import replace_loss
from tests.torchrun import python, run

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = {
    f"{page.name}-{number}": block
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL), 1
    )
    if "runs/"
    not in block  # it reads what a command of its page has written; .ci runs them in turn
}
# Named here, so that a block without an engine is one on purpose.
WITHOUT_ENGINE = {
    "accelerate.md-1",
    "accumulation.md-1",
    "global-mean.md-1",
    "lightning.md-1",
    "lightning.md-2",
    "migrating.md-3",
    "numerics.md-1",
    "precision.md-1",
    "scaler.md-1",
    "testing.md-1",
    "troubleshooting.md-1",
}


def run_block(name: str) -> tuple[int, int]:
    """Run a block as torchrun runs a script; return its engine's steps and number of ranks."""
    if int(os.environ["WORLD_SIZE"]) == 1:
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[variable]
    else:
        os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="none")
    steps = _check_weights()
    exec(compile(BLOCKS[name], name, "exec"), {"__name__": "block"})
    return len(steps), max(steps, default=1)


def _check_weights() -> list[int]:
    """Compare the weight of each step with what the loss functions of all ranks have returned.

    The list that is returned gets the number of ranks of each step.
    """
    step = Engine.step
    found: list[int] = []

    def checked(engine: Engine, microbatches: Any, **options: Any) -> StepOutcome:
        loss, weights = engine._setup.loss, []

        def noting(module: Any, batch: Any) -> Any:
            loss_sum, weight = loss(module, batch)
            if torch.is_grad_enabled():  # not what the first step tries out
                weights.append(float(weight))
            return loss_sum, weight

        replace_loss(engine, noting)
        outcome = step(engine, microbatches, **options)
        replace_loss(engine, loss)
        total = torch.tensor(sum(weights), dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(total)
        assert len(weights) == len(microbatches)
        assert outcome.numbers.weight == total > sum(weights) * (engine.world.world_size > 1)
        found.append(engine.world.world_size)
        return outcome

    Engine.step = checked  # type: ignore[method-assign]  # in a process that ends with the block
    return found


@pytest.mark.parametrize("world_size", [nightly(1), 2])  # pages are run in one process by .ci
@pytest.mark.parametrize("name", BLOCKS)
def test_code_block_runs(name: str, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_port() as port:
        monkeypatch.setenv("MASTER_PORT", str(port))
        results = run_ranks(run_block, world_size, name, initialize=False)
    for steps, ranks in results:
        assert (steps == 0) == (name in WITHOUT_ENGINE)
        assert ranks == world_size or not steps


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--nproc-per-node=2"]])
def test_readme_engine_runs_as_script(launcher: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BLOCKS["README.md-1"])
    standalone = ["--standalone"] if launcher else []
    result = run(python(*launcher, *standalone, str(script)), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    ranks = 2 if launcher else 1
    # The batch is divided over the ranks.
    assert result.stdout.count("weight=32.0") == ranks
