"""The gradient norm of each layer, compared with float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from distmp.data.order import sample_indices
from distmp.distributed.stopping import StopSignals
from distmp.distributed.world import World
from distmp.telemetry.console import Console
from distmp.telemetry.records import read_records
from distmp.training.callbacks import Callback, PendingStep
from distmp.training.trainer import Trainer
from tests.ranks import ranks
from tests.reference import make_model, weights
from tests.training.test_resume import GLOBAL_BATCH, SIZE, Samples, configuration

CASES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "ddp, fp16": {"strategy": "ddp", "precision": {"policy": "fp16"}},
    "sharded optimizer": {"strategy": "ddp", "shard_optimizer": True},
    "fsdp": {"strategy": "fsdp"},
    "fsdp, the host skips": {
        "strategy": "fsdp",
        "optim": {"name": "torch.optim:RMSprop", "lr": 0.01},
    },
}


class Weights(Callback):
    """Keeps the weights before the measured step."""

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}

    def on_step_launched(self, trainer: Trainer, step: PendingStep) -> None:
        if step.step == 3:
            self.values = weights(trainer.engine)


def reference(values: dict[str, torch.Tensor], seed: int) -> dict[str, float]:
    """Return the norms of step 4 per layer, in float64."""
    model = make_model().double()
    model.load_state_dict({name: values[name].double() for name in model.state_dict()})
    order = sample_indices(seed, 3 * GLOBAL_BATCH, GLOBAL_BATCH, SIZE)
    data = Samples(augmented=False, poison=1.0)
    batch = [int(index) for index in order]
    F.cross_entropy(model(data.inputs[batch].double()), data.labels[batch]).backward()
    squares: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        layer = name.rpartition(".")[0]
        squares[layer] = squares.get(layer, 0.0) + float(parameter.grad.square().sum())
    return {layer: square**0.5 for layer, square in squares.items()}


@ranks(2, timeout=150)
def test_norms_of_layers_are_those_of_float64(tmp_path: Path) -> None:
    for number, (name, values) in enumerate(CASES.items()):
        optim = {"max_norm": 0.01, **values.get("optim", {})}  # gradients are clipped
        config = configuration(
            tmp_path / str(number),
            **{**values, "optim": optim, "steps": 5, "log": {"grad_norms_every": 4}},
        )
        world, kept = World.current("cpu"), Weights()
        run = Trainer(config, world, Console(config.log, quiet=True), [kept])
        assert run.run(StopSignals())
        if world.rank:
            continue
        records = read_records(tmp_path / str(number) / "steps.jsonl")
        assert [r.step for r in records if r.layer_grad_norms is not None] == [4]
        found = records[3].layer_grad_norms
        assert found is not None
        expected = reference(kept.values, config.seed)
        assert [*found] == [*expected]
        tolerance = 2e-2 if "fp16" in name else 1e-5
        for layer, norm in expected.items():
            assert found[layer] == pytest.approx(norm, rel=tolerance), layer
