"""The engine of a script joins the ranks that a launcher has started, or raises an error."""

from __future__ import annotations

import os
import platform
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distmp
from distmp.distributed.world import world_of_process
from distmp.errors import ConfigError
from tests.elastic import Job, run_jobs
from tests.marks import nightly
from tests.ranks import ranks
from tests.reference import make_engine, sum_of_squares
from tests.torchrun import python, run

SCRIPT = """
import os, sys
import torch
import distmp

torch.manual_seed(int(os.environ.get("RANK", 0)))


def loss(model, batch):
    return model(batch).square().sum(), len(batch)


engine = distmp.Engine(
    torch.nn.Linear(3, 2),
    loss,
    lambda named: torch.optim.AdamW(named, lr=0.1),
    policy="fp32",
    strategy=sys.argv[1],
)
for step in range(3):
    outcome = engine.step([torch.randn(4, 3), torch.randn(1, 3)])
    if sys.argv[2:] == ["fail"] and engine.world.rank == 1:
        raise SystemExit("rank 1 has a reason")
weight = [value.full_tensor() if hasattr(value, "full_tensor") else value
          for value in engine.module.parameters()][0]
text = f"{engine.strategy} {outcome.numbers.weight:g} {weight.sum().item()!r} {engine.world.device}"
os.write(1, f"{text}\\n".encode())
if sys.argv[2:] and engine.world.rank == int(sys.argv[3]):
    batch = [torch.randn(4, 3)]
    calls = {
        "step": lambda: engine.step(batch),
        "save": lambda: engine.save("checkpoints"),
        "export": lambda: engine.export("weights"),
        "gather": lambda: engine.gather(batch[0]),
        "evaluate": lambda: engine.evaluate(batch),
    }
    calls[sys.argv[2]]()
"""

SAMPLES = torch.arange(120.0).view(40, 3) / 100
LINEAR: dict[str, Any] = {
    "strategy": "ddp",
    "model": torch.nn.Linear(3, 1),
    "loss": sum_of_squares,
}


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def torchrun(*arguments: str) -> list[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return python(*launcher, *arguments)


@pytest.mark.nightly
def test_ranks_of_torchrun_train_one_model(script: str) -> None:
    result = run(torchrun(script, "fsdp"), cwd=Path(script).parent)
    assert result.returncode == 0, result.stderr
    assert_one_model(result.stdout, "fsdp")
    assert "destroy_process_group" not in result.stderr


def test_replicas_have_equal_weights(script: str, tmp_path: Path) -> None:
    jobs = [Job([script, name], entry="tests.elastic:script") for name in ("auto", "ddp")]
    for result in run_jobs(jobs, tmp_path):
        assert result.exit_codes == {}, result
        assert_one_model(result.stdout, "ddp")
        assert "destroy_process_group" not in result.stderr


def assert_one_model(output: str, strategy: str) -> None:
    first, second = output.splitlines()
    assert first == second
    assert first.startswith(f"{strategy} 10 ")  # the samples of both ranks


def test_error_names_the_rank_that_ended(script: str, tmp_path: Path) -> None:
    (result,) = run_jobs([Job([script, "ddp", "fail"], entry="tests.elastic:script")], tmp_path)
    assert 1 in result.exit_codes.values(), result
    assert "rank 1 has a reason" in result.stderr
    # The other rank prints its message unless torchrun ends it before.
    if "LostPeerError" in result.stderr:
        assert "rank 0 of 2 stops because another rank has ended" in result.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("call", "rank"),
    [
        ("save", 0),
        ("evaluate", 1),
        *(nightly(call, 0) for call in ("gather", "export", "step")),
    ],
)
def test_error_names_the_rank_that_ended_before_a_call(script: str, call: str, rank: int) -> None:
    """Rank 0 saves alone at the end of the script: the other rank prints no cause."""
    result = run(torchrun(script, "ddp", call, str(rank)), cwd=Path(script).parent)
    who = "" if call == "step" else f", {1 - rank} on {platform.node()},"
    less = "took fewer steps" if call == "step" else f"called engine.{call}() less often"
    assert (
        f"LostPeerError: rank {rank} of 2 stops because another rank has ended; the output of that "
        f"rank{who} has the cause; if it has no error, that rank was killed, called sys.exit, or "
        f"{less} than this rank"
    ) in result.stderr


@pytest.fixture
def alone(script: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Run the script in this process, as one that was started with these variables."""

    def run_alone(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", [script, "auto"])
        runpy.run_path(script)

    return run_alone


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            "MASTER_ADDR = None: is not set, so this rank cannot join the 2 ranks of WORLD_SIZE",
        ),
        (
            {"WORLD_SIZE": "2"},
            "RANK = None: is not set although WORLD_SIZE is (nor LOCAL_RANK, LOCAL_WORLD_SIZE)",
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"},
            "OMPI_COMM_WORLD_SIZE = 4: 4 processes were started together",
        ),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, "SLURM_STEP_NUM_TASKS = 2"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "PMI_SIZE = 2"),
    ],
)
def test_ranks_that_cannot_be_joined_are_refused(
    alone: Callable[[dict[str, str]], None],
    variables: dict[str, str],
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        alone(variables)
    assert capfd.readouterr().out == ""
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "4"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # a test in a batch script
    ],
)
def test_process_with_world_size_1_trains_alone(
    alone: Callable[[dict[str, str]], None],
    variables: dict[str, str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    alone(variables)
    assert capfd.readouterr().out.startswith("single 5 ")


@pytest.mark.nightly
def test_process_without_launcher_trains_alone(script: str) -> None:
    result = run(python(script, "auto"), cwd=Path(script).parent)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("single 5 ")
    assert result.stderr == ""


@ranks(2, initialize=False)
def test_a_group_of_one_among_several_ranks_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="WORLD_SIZE = '2': several ranks were started, but"):
        world_of_process("cpu")


@ranks(2)
def test_a_rank_that_leaves_out_a_step_is_named_in_the_next_one() -> None:
    engine, loader = make_engine(**LINEAR), distmp.DataLoader(SAMPLES, batch_size=8)
    batches = iter(loader)
    for _ in range(2):
        engine.step(next(batches))
    if dist.get_rank() == 1:
        next(batches)  # without a call of `step`
    with pytest.raises(ConfigError) as error:
        engine.step(next(batches))
    assert str(error.value).startswith(
        "microbatches of engine.step = step 3 of the DataLoader in call 3 on rank 0; "
        "step 4 of the DataLoader in call 3 on rank 1: differs between ranks"
    )
    assert engine.step_counts.tolist() == [2, 1, 1]


@ranks(2)
def test_a_rank_may_replace_the_microbatches_of_the_loader() -> None:
    engine, loader = make_engine(**LINEAR), distmp.DataLoader(SAMPLES, batch_size=8)
    for step, microbatches in enumerate(loader):
        without_samples = step == 2 * dist.get_rank()
        engine.step([torch.zeros(0, 3)] if without_samples else microbatches)
    assert engine.step_counts.tolist() == [5, 0, 0]


@ranks(2)
def test_a_group_that_exists_is_used() -> None:
    world = world_of_process("cpu")
    assert (world.rank, world.world_size) == (int(os.environ["RANK"]), 2)
    assert world.group is dist.group.WORLD


def test_the_device_is_that_of_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: current.__setitem__(0, device.index)
    )
    monkeypatch.setattr("distmp.distributed.world.usable_device", torch.device)
    from distmp.distributed.world import _device_of_rank

    assert _device_of_rank(None, 2) == torch.device("cuda", 2)
    assert _device_of_rank("cuda", 0) == torch.device("cuda", 2)  # set before by set_device
    assert _device_of_rank("cuda:1", 2) == torch.device("cuda", 1)
    assert current == [1]  # FSDP computes on the current device
    assert _device_of_rank("cpu", 2) == torch.device("cpu")
