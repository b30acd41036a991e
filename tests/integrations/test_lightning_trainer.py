"""Lightning's Trainer with distmp's precision plugin, on real ranks, against plain float64 loops.

Importing Lightning takes seconds, so it is imported only in the ranks, and one start of ranks
serves several checks.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import distmp
from benchmarks.figures import ROOT
from distmp.integrations.lightning import MixedPrecision
from distmp.scaling.settings import LossScaleConfig
from tests.ranks import ranks, same_on_all_ranks

RULES = LossScaleConfig(init=2.0**8)
LR = 0.1
MAX_NORM = 0.05


def rank() -> int:
    return dist.get_rank()


def batch(step: int, of_rank: int, size: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + of_rank)
    return torch.randn(size, 8, generator=generator)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def per_sample(net: nn.Module, inputs: Tensor) -> Tensor:
    return (net(inputs).float() - 1).square()


def make_trainer(pl: Any, plugin: Any, steps: int, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        "strategy": "ddp",
        "max_steps": steps,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    return pl.Trainer(plugins=plugin, **{**defaults, **options})


def loader(batches: list[Tensor]) -> DataLoader[Tensor]:
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def make_module(pl: Any, optimizer: Callable[..., Any], **options: Any) -> Any:
    """Return a module whose gradient overflows at `overflow_at` on the last rank only.

    Options:
        overflow_at: The step; None for none.
        ignored: Name of a parameter that DDP does not reduce.
        weighted: Whether the loss is the sum with its weight.
        clipped_after: Indices of the batches after whose backward gradients are clipped.
        shard: Called with the net in `configure_model`.
        frequency: Number of batches between steps of the scheduler.
    """

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()
            self.norms: list[float] = []
            self.rates: list[float] = []
            self._ddp_params_and_buffers_to_ignore = [options.get("ignored")]

        def configure_model(self) -> None:
            if "shard" in options:
                options["shard"](self)

        def training_step(self, inputs: Tensor, _: int) -> Tensor:
            losses = per_sample(self.net, inputs)
            self.allow_tf32 = torch.backends.cudnn.allow_tf32
            if options.get("weighted"):
                plugin = self.trainer.precision_plugin
                loss = plugin.weighted_loss(losses.sum(), losses.numel())
                torch.testing.assert_close(loss, losses.mean())
                return loss
            return losses.mean()

        def on_after_backward(self) -> None:
            if self.trainer.fit_loop.epoch_loop.batch_idx in options.get("clipped_after", ()):
                limit = {"gradient_clip_val": 1e9, "gradient_clip_algorithm": "norm"}
                self.clip_gradients(self.optimizers(), **limit)
            if self.global_step == options.get("overflow_at") and rank() == 1:
                gradient = self.net[2].bias.grad
                local(gradient if not hasattr(gradient, "to_local") else self.net[0].weight.grad)[
                    0
                ] = torch.inf

        def on_before_optimizer_step(self, _: Any) -> None:
            squares = [full(p.grad).double().square().sum() for p in self.parameters()]
            self.norms.append(float(torch.stack(squares).sum().sqrt()))

        def on_train_batch_end(self, *_: Any) -> None:
            self.rates.append(self.optimizers().param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            updated = optimizer(self.parameters())
            schedule = torch.optim.lr_scheduler.ExponentialLR(updated, 0.5)
            config = {"scheduler": schedule, "interval": "step"}
            return [updated], [config | {"frequency": options.get("frequency", 1)}]

    return Module()


def reference(
    groups: Iterable[list[Tensor]], max_norm: float | None = None, skipped: tuple[int, ...] = ()
) -> tuple[list[Tensor], list[float]]:
    """Train on the mean over each group of batches in float64; return weights and norms."""
    net = make_net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    norms = []
    for step, group in enumerate(groups):
        optimizer.zero_grad()
        losses = [(net(inputs.double()) - 1).square() for inputs in group]
        torch.cat(losses).mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(
            net.parameters(), torch.inf if max_norm is None else max_norm
        )
        norms.append(float(norm))
        if step not in skipped:
            optimizer.step()
            schedule.step()
    return [parameter.detach() for parameter in net.parameters()], norms


def assert_weights(module: Any, wanted: list[Tensor], tolerance: float) -> None:
    found = [full(parameter).detach() for parameter in module.net.parameters()]
    for value, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(value.double(), other, rtol=0, atol=tolerance)


def fused_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, fused=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


@ranks(1)
def test_trainer_is_audited_as_on_the_page() -> None:
    import lightning.pytorch as pl

    page = (ROOT / "docs" / "testing.md").read_text()
    (block,) = re.findall(r"```py\n(def on_train_start.*?)```", page, re.DOTALL)
    hooks: dict[str, Any] = {"distmp": distmp}
    exec(block, hooks)
    for second, expected in ((4, "gradient right"), (1, "microbatch_means")):
        module = make_module(pl, sgd)
        for name in ("on_train_start", "on_train_end"):
            setattr(module, name, hooks[name].__get__(module))
        trainer = make_trainer(pl, MixedPrecision("fp32", "cpu"), 2, accumulate_grad_batches=2)
        trainer.fit(module, loader([batch(step, 0, (4, second)[step % 2]) for step in range(4)]))
        assert module.audit.report.steps == 2
        assert expected in str(module.audit.report)


@ranks(2, timeout=120)
def test_lightning_trainer_trains_under_policies(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    _check_overflow_on_one_rank(pl)
    _check_fsdp2(pl)
    _check_weights(pl)
    _check_resume(pl, tmp_path)
    _check_gan(pl)
    _check_what_lightning_does(pl)


def _check_overflow_on_one_rank(pl: Any) -> None:
    """Both ranks skip, clip the unscaled gradient, and do not advance the learning rate."""
    for optimizer in (fused_sgd, sgd):
        plugin = MixedPrecision("16-mixed", loss_scale=RULES)
        module = make_module(pl, optimizer, overflow_at=1, ignored="net.2.bias")
        trainer = make_trainer(pl, plugin, 4, gradient_clip_val=MAX_NORM)
        trainer.fit(module, loader([batch(step, rank()) for step in range(4)]))
        assert plugin.scaler is not None
        assert plugin.scaler.get_scale() == 2.0**7
        assert module.rates == pytest.approx([LR / 2, LR / 2, LR / 4, LR / 8])
        reduced = [p.tolist() for n, p in module.net.named_parameters() if n != "2.bias"]
        assert same_on_all_ranks(reduced)
        assert all(parameter.isfinite().all() for parameter in module.parameters())

    # A scheduler that is called every two batches does not lose both.
    module = make_module(pl, sgd, overflow_at=1, frequency=2)
    trainer = make_trainer(pl, MixedPrecision("16-mixed", loss_scale=RULES), 4)
    trainer.fit(module, loader([batch(step, rank()) for step in range(4)]))
    assert module.rates == pytest.approx([LR, LR / 2, LR / 2, LR / 4])

    # Without the ignored parameter, the whole result is that of float64. The policy's switches
    # apply during `fit`.
    assert torch.backends.cudnn.allow_tf32
    plugin = MixedPrecision("16-mixed", loss_scale=RULES)
    module = make_module(pl, fused_sgd)
    trainer = make_trainer(pl, plugin, 3, gradient_clip_val=MAX_NORM)
    trainer.fit(module, loader([batch(step, rank()) for step in range(3)]))
    assert (module.allow_tf32, torch.backends.cudnn.allow_tf32) == (False, True)
    wanted, norms = reference([_all(step) for step in range(3)], MAX_NORM)
    assert_weights(module, wanted, 1e-4)
    assert module.norms == pytest.approx(norms, rel=5e-3)  # what hooks see is unscaled


def _all(step: int) -> list[Tensor]:
    return [batch(step, of_rank) for of_rank in range(dist.get_world_size())]


def _check_fsdp2(pl: Any) -> None:
    """A float16 policy with shards: only rank 1 has the infinity, in its shard."""
    strategies = importlib.import_module("lightning.pytorch.strategies")

    def shard(module: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = module.device_mesh["data_parallel"]
        fully_shard(module.net[0], mesh=mesh)
        fully_shard(module.net, mesh=mesh)

    def strategy() -> Any:
        return strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)

    plugin = MixedPrecision("fp16-autocast", loss_scale=RULES)
    module = make_module(pl, sgd, overflow_at=1, shard=shard)
    trainer = make_trainer(pl, plugin, 3, strategy=strategy(), gradient_clip_val=MAX_NORM)
    trainer.fit(module, loader([batch(step, rank()) for step in range(3)]))
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 2.0**7
    assert_weights(module, reference(map(_all, range(3)), MAX_NORM, skipped=(1,))[0], 1e-4)
    with pytest.raises(ValueError, match=r"does not support .*16-mixed"):
        make_trainer(pl, None, 1, strategy=strategy(), precision="16-mixed")


def _check_weights(pl: Any) -> None:
    """Microbatches of 1 to 9 samples, 3 per step and 1 in the last one."""
    sizes = [[1, 5, 2, 9, 1, 3, 4], [6, 2, 8, 1, 7, 2, 1]]
    batches = [[batch(i, r, size) for i, size in enumerate(sizes[r])] for r in range(2)]
    steps = [slice(0, 3), slice(3, 6), slice(6, 7)]
    wanted, _ = reference([[*batches[0][step], *batches[1][step]] for step in steps])
    options: dict[str, Any] = {"accumulate_grad_batches": 3}
    for policy, tolerance, clipped in (("fp32", 1e-6, (2, 5, 6)), ("fp16-autocast", 1e-3, ())):
        plugin = MixedPrecision(policy, loss_scale=RULES if policy != "fp32" else None)
        module = make_module(pl, sgd, weighted=True, clipped_after=clipped)
        make_trainer(pl, plugin, 3, **options).fit(module, loader(batches[rank()]))
        assert_weights(module, wanted, tolerance)
    # Lightning averages microbatches, and divides the single one of the last step by 3.
    module = make_module(pl, sgd)
    make_trainer(pl, None, 3, **options).fit(module, loader(batches[rank()]))
    differences = [
        (a - b).abs().max() for a, b in zip(module.net.parameters(), wanted, strict=True)
    ]
    assert max(differences) > 1e-2


def _check_resume(pl: Any, tmp_path: Path) -> None:
    """A resumed run has the loss scale, and the bits, of one that was not interrupted."""
    batches = [batch(step, rank()) for step in range(2)]  # an epoch of two steps

    def run(epochs: int, resume: Path | None = None) -> tuple[Any, Any]:
        plugin = MixedPrecision("fp16-autocast", loss_scale=RULES)
        module = make_module(pl, fused_sgd, overflow_at=1)
        trainer = make_trainer(pl, plugin, -1, max_epochs=epochs)
        trainer.fit(module, loader(batches), ckpt_path=resume)
        return trainer, module

    trainer, _ = run(1)
    path = tmp_path / "middle.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)
    assert saved["MixedPrecision"]["scale"] == 2.0**7
    resumed, module = run(2, path)
    complete, other = run(2)
    assert resumed.scaler.get_scale() == complete.scaler.get_scale() == 2.0**7
    for found, wanted in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(found, wanted)

    # A checkpoint of Lightning's own plugin.
    trainer = make_trainer(pl, lightnings_plugin(2.0**10), -1, max_epochs=1)
    trainer.fit(make_module(pl, fused_sgd), loader(batches))
    trainer.save_checkpoint(tmp_path / "lightning.ckpt")
    assert run(2, tmp_path / "lightning.ckpt")[0].scaler.get_scale() == 2.0**10


def make_gan(pl: Any, first: Callable[..., Any]) -> Any:
    """Return a module with two optimizers that it steps and clips itself."""

    class Gan(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = make_net()

        def training_step(self, inputs: Tensor, _: int) -> None:
            for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
                optimizer.zero_grad()
                self.manual_backward(per_sample(self.net, inputs).mean() + sign)
                self.clip_gradients(
                    optimizer, gradient_clip_val=MAX_NORM, gradient_clip_algorithm="norm"
                )
                optimizer.step()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [first(self.net[0].parameters()), sgd(self.net[2].parameters())]

    return Gan()


def _check_gan(pl: Any) -> None:
    """The scale doubles at every step, between the two optimizers."""
    net = make_net().double()
    for step in range(3):
        for index in (0, 2):
            net.zero_grad()
            torch.cat([(net(x.double()) - 1).square() for x in _all(step)]).mean().backward()
            torch.nn.utils.clip_grad_norm_(net[index].parameters(), MAX_NORM)
            for parameter in net[index].parameters():
                assert parameter.grad is not None
                parameter.data -= LR * parameter.grad
    rules = LossScaleConfig(init=2.0**8, growth_interval=1)
    plugin = MixedPrecision("fp16-autocast", loss_scale=rules)
    module = make_gan(pl, fused_sgd)
    make_trainer(pl, plugin, 6).fit(module, loader([batch(step, rank()) for step in range(3)]))
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 2.0**14
    assert_weights(module, [parameter.detach() for parameter in net.parameters()], 1e-4)


def lightnings_plugin(init_scale: float = 2.0**8) -> Any:
    plugins = importlib.import_module("lightning.pytorch.plugins")
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    return plugins.MixedPrecision("16-mixed", "cpu", scaler)


def _check_what_lightning_does(pl: Any) -> None:
    """The documentation says so; change it there if Lightning changes."""
    batches = [batch(step, rank()) for step in range(3)]
    trainer = make_trainer(pl, lightnings_plugin(), 1, gradient_clip_val=MAX_NORM)
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        trainer.fit(make_module(pl, fused_sgd), loader(batches))

    # One rank skips alone, the learning rate advances, and hooks see scaled gradients.
    module = make_module(pl, fused_sgd, overflow_at=1, ignored="net.2.bias")
    trainer = make_trainer(pl, lightnings_plugin(), 3)
    trainer.fit(module, loader(batches))
    assert module.rates == pytest.approx([LR / 2, LR / 4, LR / 8])
    assert not same_on_all_ranks(module.net[0].weight.tolist())
    assert module.norms[0] > 100

    # `clip_gradients` of manual optimization clips scaled gradients: updates are 1/256 as large.
    module = make_gan(pl, sgd)
    make_trainer(pl, lightnings_plugin(), 2).fit(module, loader(batches[:1]))
    changes = [
        (a - b).norm() for a, b in zip(module.parameters(), make_net().parameters(), strict=True)
    ]
    assert max(changes) < LR * MAX_NORM / 100
