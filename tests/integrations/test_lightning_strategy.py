"""Lightning's Trainer with 16-bit parameters and master weights, against float64 and stock DDP.

Importing Lightning takes seconds, so one start of ranks serves all checks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp.distributed.world import World
from distmp.errors import ConfigError, TrainingError
from distmp.integrations.lightning import MasterWeightsStrategy, MixedPrecision
from distmp.integrations.lightning.replica import MasterWeightsReplica
from distmp.precision import policy
from distmp.scaling import LossScaleConfig
from tests.integrations.test_lightning_trainer import loader, make_trainer, same_on_all_ranks
from tests.ranks import ranks

MICROBATCHES = 64
LR = 0.5


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


def inputs(index: int, rank: int | None = None, size: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * (dist.get_rank() if rank is None else rank))
    generator.manual_seed(generator.initial_seed() + index)
    return torch.randn(size, 8, generator=generator)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def make_module(pl: Any, make_optimizer: Callable[..., Any] = sgd, **options: Any) -> Any:
    """Return a module; options: net, loss(module, batch, index), automatic."""

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = options["net"]() if "net" in options else make_net()
            self.automatic_optimization = options.get("automatic", True)
            self.gradients: list[list[Tensor]] = []
            self.outputs: list[torch.dtype] = []
            self.index = 0

        def training_step(self, batch: Tensor, _: int) -> Any:
            self.index += 1
            if "loss" in options:
                return options["loss"](self, batch, self.index - 1)
            outputs = self.net(batch)
            self.outputs.append(outputs.dtype)
            return (outputs - 1).square().mean()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            gradients = [
                p.grad.clone() for group in optimizer.param_groups for p in group["params"]
            ]
            self.gradients.append(gradients)
            self.dtypes_of_grads = {p.grad.dtype for p in self.parameters() if p.requires_grad}

        def test_step(self, batch: Tensor, batch_idx: int) -> None:
            self.tested = self.net(batch)
            self.dtype_of_test = self.net[0].weight.dtype

        def configure_optimizers(self) -> Any:
            return make_optimizer(self.parameters())

    return Module()


def fit(
    pl: Any, precision: str, module: Any, batches: list[Tensor], **options: Any
) -> tuple[Any, MixedPrecision]:
    rules = LossScaleConfig(init=2.0**8) if precision == "fp16" else None
    plugin = MixedPrecision(precision, loss_scale=rules)
    resume = options.pop("resume", None)
    options = {"strategy": MasterWeightsStrategy(), "max_epochs": 1, **options}
    trainer = make_trainer(pl, plugin, -1, **options)
    trainer.fit(module, loader(batches), ckpt_path=resume)
    return trainer, plugin


@pytest.mark.nightly
@ranks(2, timeout=120)
def test_the_strategy(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    _check_gradients(pl)
    _check_overflow_on_one_rank(pl)
    _check_weights(pl)
    _check_own_optimizer_step(pl)
    _check_resume(pl, tmp_path)
    _check_the_model_afterwards(pl)
    _check_refusals(pl)


class Scale(nn.Module):
    """Multiplies by a weight, so that its gradient is the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, values: Tensor) -> Tensor:
        return values * self.weight


def _check_gradients(pl: Any) -> None:
    """64 microbatches whose gradients bfloat16 represents: only their sum is rounded."""
    batches = [inputs(index, size=1).bfloat16().float() for index in range(MICROBATCHES)]
    data = [inputs(i, r, size=1).bfloat16() for i in range(MICROBATCHES) for r in range(2)]
    wanted = torch.cat(data).double().mean(0)
    options: dict[str, Any] = {"accumulate_grad_batches": MICROBATCHES}

    def loss(module: Any, batch: Tensor, _: int) -> Any:
        return module.net(batch).sum()

    def error(module: Any) -> float:
        found = module.gradients[0][0].double()
        return float((found - wanted).norm() / wanted.norm())

    module = make_module(pl, net=Scale, loss=loss)
    fit(pl, "bf16", module, batches, **options)
    assert len(module.gradients) == 1
    ours = error(module)
    assert module.dtypes_of_grads == {torch.float32}
    module = make_module(pl, net=Scale, loss=loss)
    trainer = make_trainer(pl, None, -1, max_epochs=1, precision="bf16-true", **options)
    trainer.fit(module, loader(batches))
    assert ours < 1e-6
    assert error(module) > 5e-3  # Lightning with bfloat16 parameters


def _check_overflow_on_one_rank(pl: Any) -> None:
    """Rank 1 overflows: both skip; weights, statistics and scale are the same, and finite."""

    def loss(module: Any, batch: Tensor, index: int) -> Tensor:
        factor = torch.inf if (index, dist.get_rank()) == (3, 1) else 1.0
        before.append(module.net[0].weight.clone())
        statistics.append(module.net[1].running_mean.clone())
        return (module.net(batch * factor) - 1).square().mean()

    before: list[Tensor] = []
    statistics: list[Tensor] = []
    module = make_module(pl, adamw, loss=loss)
    batches = [inputs(index) for index in range(8)]
    _, plugin = fit(pl, "fp16", module, batches, accumulate_grad_batches=2, gradient_clip_val=0.1)
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 2.0**7
    assert before[0].dtype == torch.float16
    assert not torch.equal(before[0], before[2])
    assert torch.equal(before[2], before[4])  # the step of microbatches 2 and 3 is skipped
    assert not torch.equal(before[4], before[6])
    state = {name: value.tolist() for name, value in module.state_dict().items()}
    assert same_on_all_ranks(state)
    assert all(value.isfinite().all() for value in module.state_dict().values())
    assert torch.equal(statistics[2], statistics[4])


def _check_weights(pl: Any) -> None:
    """Microbatches of 1 to 9 samples, 4 per step and 3 in the last; FP32 weights follow float64."""
    sizes = [[1, 5, 2, 9, 1, 3, 4], [6, 2, 8, 1, 7, 2, 1]]
    # Sums of integers are exact in bfloat16.
    data = [[inputs(i, r, size).round() for i, size in enumerate(sizes[r])] for r in range(2)]
    weight = torch.ones(8, dtype=torch.float64)
    for step in (slice(0, 4), slice(4, 7)):
        weight -= LR * torch.cat([*data[0][step], *data[1][step]]).double().mean(0)

    def loss(module: Any, batch: Tensor, _: int) -> Tensor:
        plugin = module.trainer.precision_plugin
        weighted: Tensor = plugin.weighted_loss(module.net(batch).sum(), len(batch))
        return weighted

    module = make_module(pl, net=Scale, loss=loss)
    fit(pl, "bf16", module, data[dist.get_rank()], accumulate_grad_batches=4)
    torch.testing.assert_close(module.net.weight.double(), weight, rtol=0, atol=1e-6)
    assert module.net.weight.dtype == torch.float32  # in bfloat16 the error is above 1e-3


def _check_own_optimizer_step(pl: Any) -> None:
    """A hook that only computes gradients of every second batch: the next step drops them."""

    def loss(module: Any, batch: Tensor, _: int) -> Any:
        return module.net(batch).sum()

    module = make_module(pl, net=Scale, loss=loss)

    def optimizer_step(_: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        if batch_idx % 2:
            optimizer.step(closure=closure)
        else:
            closure()

    module.optimizer_step = optimizer_step
    fit(pl, "bf16", module, [inputs(index).round() for index in range(4)])
    used = torch.stack([inputs(i, r).round().sum(0) for i in (1, 3) for r in range(2)])
    torch.testing.assert_close(module.net.weight.detach(), 1 - LR * used.sum(0) / 2)


def _check_resume(pl: Any, tmp_path: Path) -> None:
    """A resumed run has the bits of one that was not interrupted, in FP32 checkpoints."""
    batches = [inputs(index) for index in range(4)]
    for precision in ("bf16", "fp16"):
        middle = tmp_path / f"{precision}.ckpt"

        class Saved(pl.Callback):  # type: ignore[misc, name-defined]
            def on_train_epoch_end(self, trainer: Any, module: Any, path: Any = middle) -> None:
                assert module.net[0].weight.dtype != torch.float32
                trainer.save_checkpoint(path)

        options: dict[str, Any] = {"accumulate_grad_batches": 2}
        fit(pl, precision, make_module(pl, adamw), batches, callbacks=[Saved()], **options)
        saved = torch.load(middle, weights_only=False)
        state = saved["state_dict"]
        assert list(state) == list(make_module(pl).state_dict())
        assert {value.dtype for value in state.values()} == {torch.float32, torch.int64}
        assert not torch.equal(state["net.0.weight"], state["net.0.weight"].bfloat16().float())
        runs = []
        for resume in (middle, None):
            module = make_module(pl, adamw)
            trainer, _ = fit(pl, precision, module, batches, resume=resume, max_epochs=2, **options)
            runs.append((module.state_dict(), trainer.optimizers[0].state_dict()["state"]))
        torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)

    # Lightning's DDP resumes it in FP32.
    module = make_module(pl, adamw)
    trainer = make_trainer(pl, None, -1, max_epochs=2)
    trainer.fit(module, loader(batches), ckpt_path=middle)


def _check_the_model_afterwards(pl: Any) -> None:
    """Habits after `fit`: test, call, save, and fit again."""
    batches = [inputs(index) for index in range(2)]
    module = make_module(pl, adamw)
    trainer, _ = fit(pl, "bf16", module, batches)
    assert module.outputs == [torch.float32] * 2
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    assert weights["net.0.weight"].dtype == torch.float32
    trainer.test(module, loader(batches), verbose=False)
    assert module.dtype_of_test == torch.bfloat16
    assert module.tested.dtype == torch.float32
    torch.testing.assert_close(module.state_dict(), weights, rtol=0, atol=0)
    module.eval()
    plain = make_net()
    plain.load_state_dict({name.removeprefix("net."): value for name, value in weights.items()})
    assert torch.equal(module.net(batches[0]), plain.eval()(batches[0]))  # without casts
    module.train()

    class Load(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            state = {name: value + 1 for name, value in weights.items()}
            trainer.strategy.load_model_state_dict({"state_dict": state})

    steps_nothing = lambda parameters: torch.optim.SGD(parameters, lr=0.0)  # noqa: E731
    module = make_module(pl, steps_nothing)
    fit(pl, "bf16", module, batches, callbacks=[Load()])
    assert torch.equal(module.net[0].weight, weights["net.0.weight"] + 1)


def _check_refusals(pl: Any) -> None:
    batches = [inputs(index) for index in range(2)]

    def refused(
        message: str, make_optimizer: Any = sgd, precision: str = "bf16", **options: Any
    ) -> None:
        with pytest.raises((ConfigError, TrainingError), match=message):
            fit(pl, precision, make_module(pl, make_optimizer, **options), batches)

    refused("has no 16-bit parameters with FP32 master weights", precision="fp32")
    refused("has to know the last microbatch", automatic=False)
    refused("is no parameter of the LightningModule", lambda _: sgd([nn.Parameter(torch.ones(2))]))
    refused("has state of 16-bit parameters before the first step", torch.optim.Adagrad)
    refused("calls its closure several times", torch.optim.LBFGS)

    class Write(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_end(self, trainer: Any, module: Any) -> None:
            module.net[0].weight.detach().zero_()

    class Finetuning(pl.callbacks.BaseFinetuning):  # type: ignore[misc, name-defined]
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.net[0])

    for callback, message in (
        (Write(), "was written to"),
        (Finetuning(), "Finetuning.*looks for the model's parameters"),
        (pl.callbacks.StochasticWeightAveraging(0.1), "looks for the model's parameters"),
    ):
        with pytest.raises(ConfigError, match=message):
            fit(pl, "bf16", make_module(pl), batches, callbacks=[callback])
    with pytest.raises(ConfigError, match="FP32 buckets instead of torch's Distributed"):
        MasterWeightsStrategy(find_unused_parameters=True)
    with pytest.raises(ConfigError, match="cannot be pickled"):
        MasterWeightsStrategy(start_method="spawn")
    with pytest.raises(ConfigError, match=r"in the Trainer, distmp's MasterWeightsStrategy"):
        fit(pl, "bf16", make_module(pl), batches, strategy="ddp")


def test_a_step_whose_last_microbatch_has_no_loss_is_refused() -> None:
    """Lightning itself refuses it on several ranks."""
    module = nn.Sequential(nn.Linear(8, 1))
    replica = MasterWeightsReplica(module, policy("bf16"), World.current("cpu"))
    replica.begin_microbatch()
    loss = module(torch.ones(1, 8)).sum()
    with replica.backward(loss, last=False):
        loss.backward()
    replica.begin_optimizer_step()
    replica.begin_microbatch()
    with pytest.raises(TrainingError, match="no loss for the last of 2 or more microbatches"):
        replica.end_step(None)
