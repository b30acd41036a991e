"""The compared loops do the same work, and a loop that does not is refused."""

from __future__ import annotations

import os
import warnings
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from benchmarks import races
from benchmarks.loops import MAX_NORM, Alone, Loop, TorchDDP, Work
from benchmarks.peers import RACES, STEPS, check_installed, computing_dtype
from benchmarks.tables import steps
from distmp.distributed.collectives import all_gather, all_reduce, reduce_scatter
from distmp.models.settings import ModelConfig
from distmp.telemetry.measurements import begin_peak, peak_since
from distmp.utils.dtypes import dtype_name
from tests.ranks import run_ranks

TINY = Work(
    ModelConfig(options={"layers": 2, "dimension": 32, "heads": 2, "hidden": 32}),
    torch.device("cpu"),
    samples=2,
    length=8,
)


class Unsynchronised(TorchDDP):
    """Ranks that train independently, as with accelerate if it does not detect the others."""

    def __init__(self, work: Work) -> None:
        super().__init__(work, None)
        self._ddp = self.model


class AnotherOptimizer(TorchDDP):
    def __init__(self, work: Work) -> None:
        super().__init__(work, None)
        self._optimizer = torch.optim.SGD(self.model.parameters(), TINY.rate)


def trained(loop: Loop) -> dict[str, Any]:
    """Return the result of a loop as in the benchmark."""
    losses = []
    with computing_dtype(loop.model) as dtypes:
        for _ in range(STEPS):
            loop.step()
            losses.append(loop.loss())
    (computes,) = dtypes
    return {"losses": losses, "computes": dtype_name(computes)}


def train_all() -> dict[str, dict[str, Any]]:
    found = {
        "unsynchronised": trained(Unsynchronised(TINY)),
        "another optimizer": trained(AnotherOptimizer(TINY)),
    }
    for race, (_, entrants) in RACES.items():
        for name, entrant in entrants.items():
            if not entrant.missing("cpu"):
                found[f"{race} {name}"] = trained(entrant.make(TINY))
                AcceleratorState._reset_state(reset_partial_state=True)
    return found


def train_alone() -> list[float]:
    return trained(Alone(TINY, 2))["losses"]


def losses_in_float64() -> list[float]:
    """Train in float64 on all tokens of both ranks in one batch."""
    model = TINY.build().double()
    optimizer = torch.optim.AdamW(model.parameters(), TINY.rate)
    batches = [*TINY.microbatches(0), *TINY.microbatches(1)]
    inputs, targets = (torch.cat([one[key] for one in batches]) for key in ("inputs", "targets"))
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.nightly
def test_every_loop_does_the_same_work() -> None:
    reference = losses_in_float64()
    (alone,) = run_ranks(train_alone, 1)
    assert alone == pytest.approx(reference, rel=1e-6)
    assert reference[-1] < reference[0] - 0.1  # the losses change
    first, second = run_ranks(train_all, 2, timeout=100)
    assert first == second
    for race, (dtype, entrants) in RACES.items():
        result = {"reference": reference, "computes": dtype_name(dtype)}
        for name in entrants:
            if f"{race} {name}" in first:
                loop = first[f"{race} {name}"]
                races.check_same_work(name, result, loop)
                # On CPUs these compute in float32 and bfloat16 instead of float16.
                other = dtype == torch.float16 and name in ("accelerate", "Lightning Fabric")
                assert races.same_dtype(result, loop) == (not other), (race, name)
        assert any(name.startswith(f"{race} distmp") for name in first)
    for wrong in ("unsynchronised", "another optimizer"):
        with pytest.raises(SystemExit, match=f"{wrong} does not do the same work"):
            races.check_same_work(wrong, {"reference": reference}, first[wrong])


def race(**changes: Any) -> dict[str, Any]:
    return {
        "size": "1m",
        "tokens": 600,
        "computes": "float16",
        "reference": [5.0, 4.0],
        "loops": {
            "torch DDP": {
                "seconds": [2.0, 3.0, 2.0],
                "memory": 200e6,
                "losses": [5.0, 4.0004],
                "computes": "float16",
            },
            "accelerate": {
                "seconds": [1.0, 1.0, 1.0],
                "memory": 100e6,
                "losses": [5.0, 4.0],
                "computes": "float32",
            },
            "distmp `fp16`": {
                "seconds": [1.0, 3.3, 1.8],
                "memory": 220e6,
                "losses": [5.0002, 4.0],
                "computes": "float16",
            },
            **changes,
        },
        "absent": {"Lightning Fabric": "it is not installed"},
    }


def test_a_race_has_a_table() -> None:
    """accelerate is faster and smaller, but is not compared, because its dtype differs."""
    table = races.rendered("ddp fp16", race())
    head = "| ddp fp16, 1m | tokens/s | time relative to the fastest peer |"
    assert table.splitlines()[0].startswith(head)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert rows == [
        ["torch DDP", "300", "1", "200", "1.00", "1e-04"],
        ["accelerate: computes in float32", "600", "", "100", "", "0e+00"],
        ["distmp `fp16`", "333", "0.90 (0.50 to 1.10)", "220", "1.10", "4e-05"],
    ]


def test_a_race_without_peers_has_no_table() -> None:
    alone = {**race(), "loops": {"distmp `fp16`": race()["loops"]["distmp `fp16`"]}}
    assert races.rendered("ddp fp16", alone) == "No peers to compare with in ddp fp16."


def test_missing_loops_are_listed_by_reason() -> None:
    other = {
        **race(),
        "absent": {"Lightning Fabric": "it is not installed", "torch DDP": "it hangs"},
    }
    assert races.excluded({"ddp fp16": race(), "fsdp fp16": other}).splitlines() == [
        "- Excluded, because it is not installed: Lightning Fabric (ddp fp16, fsdp fp16).",
        "- Excluded, because it hangs: torch DDP (fsdp fp16).",
    ]
    assert races.excluded({"ddp fp16": {**race(), "absent": {}}}) == ""


def test_a_result_names_versions_and_machine() -> None:
    result = {
        "machine": {"cpu": "Abacus", "gpu": None, "torch": "2.13.0", "date": "2026-11-21"},
        "versions": {"accelerate": "1.15.0", "lightning-fabric": "2.6.6"},
        "ranks": 2,
        "microbatches": 4,
        "turns": 3,
        "steps": 2,
        "races": {"ddp fp16": race()},
    }
    last = steps.peers(result).splitlines()[-1]
    assert "accelerate 1.15.0, lightning-fabric 2.6.6; Abacus, torch 2.13.0" in last
    assert "2 ranks with 4 microbatches" in last


@pytest.mark.parametrize("losses", [[5.0, 4.01], [5.0, float("nan")]])
def test_another_loss_is_refused(losses: list[float]) -> None:
    loop = {"losses": losses, "computes": "float16"}
    with pytest.raises(SystemExit, match=r"may differ by 0\.0001"):
        races.check_same_work("torch DDP", race(), loop)


@pytest.mark.nightly
def test_statements_of_the_page_about_others_on_cpus() -> None:
    run_ranks(others_on_cpus, 2)


def test_gloo_copies_scattered_tensors() -> None:
    reduced, scattered, gathered = run_ranks(copies_of_gloo, 2)[0]
    assert reduced < 0.3
    assert scattered > 0.7
    assert gathered > 0.7


def copies_of_gloo() -> list[float]:
    """Return the temporary memory of collectives, relative to the size of the tensor."""
    full = torch.ones(2**23)
    part = full.chunk(2)[dist.get_rank()]
    shares = []
    for collective in (
        lambda: all_reduce(full, dist.group.WORLD),
        lambda: reduce_scatter(part, full, dist.group.WORLD),
        lambda: all_gather(full, part, dist.group.WORLD),
    ):
        collective().wait()
        start = begin_peak(full.device)
        collective().wait()
        shares.append(peak_since(start, full.device) / full.nbytes)
    return shares


def others_on_cpus() -> None:
    """docs/peers.md, "Training steps"."""
    alone = accelerate.Accelerator(cpu=True)
    assert alone.num_processes == 2  # tests.ranks sets the variables that torchrun sets
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unsharded = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
    assert unsharded.distributed_type == DistributedType.MULTI_CPU
    AcceleratorState._reset_state(reset_partial_state=True)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    assert accelerate.Accelerator(cpu=True).num_processes == 1
    AcceleratorState._reset_state(reset_partial_state=True)

    fabric = pytest.importorskip("lightning_fabric")
    with pytest.raises(ValueError, match="FSDP is only available on GPU"):
        fabric.Fabric(accelerator="cpu", devices=2, strategy="fsdp")
    strategy = fabric.strategies.ModelParallelStrategy(lambda model, mesh: model)
    with pytest.raises(ValueError, match=r"does not support .*16-mixed"):
        fabric.Fabric(accelerator="cpu", devices=2, strategy=strategy, precision="16-mixed")


def test_races_are_not_recorded_without_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.find_spec", lambda name: None if name == "gone" else 1)
    check_installed(list(RACES))
    entrants = {"a": next(iter(RACES["ddp fp32"].entrants.values()))._replace(module="gone")}
    monkeypatch.setitem(RACES, "ddp fp32", RACES["ddp fp32"]._replace(entrants=entrants))
    with pytest.raises(SystemExit, match="gone is not installed"):
        check_installed(["ddp fp32"])
