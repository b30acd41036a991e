"""Lightning Fabric with distmp's precision plugin, on real ranks, against plain float64 loops.

The Trainer's tests use the package `lightning`, these use `lightning_fabric`.
"""

from __future__ import annotations

import copy
import importlib
import logging
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from distmp.errors import ConfigError, TrainingError
from distmp.integrations.lightning import MixedPrecision, check_parallel, resolved
from distmp.integrations.step_weights import StepWeights
from distmp.precision.policy import PRESETS
from distmp.scaling.settings import LossScaleConfig
from tests.integrations.test_lightning_trainer import (
    LR,
    MAX_NORM,
    RULES,
    assert_weights,
    batch,
    full,
    loader,
    local,
    make_module,
    make_net,
    make_trainer,
    per_sample,
    rank,
    reference,
)
from tests.ranks import ranks, same_on_all_ranks
from tests.torchrun import python, run


def make_fabric(plugin: Any, strategy: Any = "ddp", **options: Any) -> Any:
    fabric = importlib.import_module("lightning_fabric").Fabric(
        accelerator="cpu", devices=2, strategy=strategy, plugins=plugin, **options
    )
    fabric.launch()
    return fabric


def sharding(policy: MixedPrecisionPolicy, *, root: bool = True) -> Any:
    """Return Fabric's strategy for FSDP2; without `root` the last layer is not sharded."""

    def shard(net: nn.Module, mesh: Any) -> nn.Module:
        options = {"mesh": mesh["data_parallel"], "mp_policy": policy}
        fully_shard(net[0], **options)  # type: ignore[index]
        return fully_shard(net, **options) if root else net

    strategies = importlib.import_module("lightning_fabric.strategies")
    return strategies.ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)


def set_up(fabric: Any, optimizer: Callable[..., Any]) -> tuple[Any, Any]:
    model = fabric.setup_module(make_net())
    return model, fabric.setup_optimizers(optimizer(model.parameters()))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, fused=True)


@ranks(2, timeout=120)
def test_lightning_fabric_trains_under_policies(tmp_path: Path) -> None:
    importlib.import_module("lightning_fabric")
    _check_two_optimizers()
    _check_fsdp2_in_float16(tmp_path)
    _check_weights()
    _check_weighted_loss_on_one_rank()
    _check_mixed_up_calls()
    _check_closure(weighted=True)
    _check_closure(weighted=False)
    _check_what_lightning_does()
    _check_models_that_contradict_the_policy()
    _check_weights_that_are_unfrozen_later()


def _check_two_optimizers() -> None:
    """An overflow that only rank 1 sees, in one optimizer, skips both; clipping does not raise."""
    rules = LossScaleConfig(init=2.0**8, growth_interval=1)
    plugin = MixedPrecision("fp16-autocast", loss_scale=rules)
    assert plugin.scaler is not None
    fabric = make_fabric(plugin)
    net = make_net()
    net._ddp_params_and_buffers_to_ignore = ["2.bias"]  # type: ignore[assignment]
    parts = [torch.optim.SGD(net[index].parameters(), lr=LR, fused=index == 0) for index in (0, 2)]
    model, *optimizers = fabric.setup(net, *parts)
    plugin.register(*optimizers)
    computed = []
    net[0].register_forward_hook(lambda *call: computed.append((call[1][0].dtype, call[2].dtype)))
    norms = []
    for step in range(3):
        before = [parameter.detach().clone() for parameter in net.parameters()]
        fabric.backward(per_sample(model, batch(step, rank())).mean())
        if step == 1 and rank() == 1:
            net[2].bias.grad.fill_(torch.inf)
        norms.append(float(fabric.clip_gradients(model, optimizers[0], max_norm=MAX_NORM)))
        gradient = net[2].weight.grad / plugin.scaler.get_scale()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        changes = [old - new.detach() for old, new in zip(before, net.parameters(), strict=True)]
        assert plugin.scaler.step_skipped == (step == 1)
        assert all(bool(change.any()) == (step != 1) for change in changes)
        if step != 1:  # the scale has not doubled between the two optimizers
            torch.testing.assert_close(changes[2], LR * gradient)
    assert norms[1] == 0
    assert norms[0] > MAX_NORM
    assert computed == 3 * [(torch.float32, torch.float16)]
    assert plugin.scaler.get_scale() == 2.0**9
    assert same_on_all_ranks([p.tolist() for n, p in net.named_parameters() if n != "2.bias"])


def _check_what_lightning_does() -> None:
    """The documentation says so; change it there if Lightning changes."""
    assert make_fabric(None, precision="16-mixed")._precision.precision == "bf16-mixed"
    plugins = importlib.import_module("lightning_fabric.plugins")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1)
    fabric = make_fabric(plugins.MixedPrecision("16-mixed", "cpu", scaler))
    net = make_net()
    parts = [torch.optim.SGD(net[index].parameters(), lr=LR) for index in (0, 2)]
    model, *optimizers = fabric.setup(net, *parts)
    assert model(torch.full((1, 8), 1e5)).isnan().all()  # inputs are rounded to 16 bits
    before = [parameter.detach().clone() for parameter in net.parameters()]
    fabric.backward(per_sample(model, batch(0, rank())).mean())
    gradients = [parameter.grad.clone() / 2.0**8 for parameter in net.parameters()]
    for optimizer in optimizers:
        optimizer.step()
    changes = [a - b.detach() for a, b in zip(before, net.parameters(), strict=True)]
    torch.testing.assert_close(changes[0], LR * gradients[0])
    torch.testing.assert_close(changes[2], LR * gradients[2] / 2)  # the scale of the next step
    fabric.backward(per_sample(model, batch(0, rank())).mean() * torch.inf)
    with pytest.raises(RuntimeError, match="non-finite"):
        fabric.clip_gradients(model, optimizers[0], max_norm=MAX_NORM)


def _check_fsdp2_in_float16(tmp_path: Path) -> None:
    """16-bit parameters with FP32 shards; the infinity is in the shard of rank 1."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)

    def start() -> tuple[Any, Any, Any, dict[str, Any]]:
        plugin = MixedPrecision("fp16", loss_scale=RULES)
        fabric = make_fabric(plugin, sharding(policy))
        model, optimizer = set_up(fabric, fused_adamw)
        return fabric, plugin, model, {"model": model, "optimizer": optimizer}

    def train(run: Any, steps: range) -> None:
        fabric, plugin, model, state = run
        for step in steps:
            output = model(batch(step, rank()))
            assert output.dtype == torch.float32
            fabric.backward((output - 1).square().mean())
            if step == 1 and rank() == 1:
                local(model.module[0].weight.grad)[0] = torch.inf
            norm = fabric.clip_gradients(model, state["optimizer"], max_norm=1.0)
            assert (full(norm) == 0) == (step == 1)
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            assert plugin.scaler.step_skipped == (step == 1)

    first = start()
    train(first, range(2))
    precision = {"precision": first[1].state_dict()}
    first[0].save(tmp_path / "checkpoint", first[3] | precision)
    train(first, range(2, 4))
    second = start()
    state = second[3] | {"precision": {}}
    second[0].load(tmp_path / "checkpoint", state)
    second[1].load_state_dict(state["precision"])
    assert second[1].scaler.get_scale() == 2.0**7
    train(second, range(2, 4))
    for found, wanted in zip(second[2].parameters(), first[2].parameters(), strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(local(found), local(wanted))


def _check_weights() -> None:
    """Microbatches of different sizes, reduced once per step."""
    sizes = [[1, 5, 2], [6, 2, 8]]
    batches = [[batch(i, r, size) for i, size in enumerate(sizes[r])] for r in range(2)]
    wanted, norms = reference([[*batches[0], *batches[1]]], MAX_NORM)
    strategies = ("ddp", sharding(MixedPrecisionPolicy()))
    for strategy, policy in zip(strategies, ("fp16-autocast", "fp32"), strict=True):
        plugin = MixedPrecision(policy, loss_scale=RULES if policy != "fp32" else None)
        fabric = make_fabric(plugin, strategy)
        model, optimizer = set_up(fabric, sgd)
        for index, inputs in enumerate(batches[rank()]):
            with fabric.no_backward_sync(model, enabled=index < 2):
                losses = per_sample(model, inputs)
                fabric.backward(plugin.weighted_loss(losses.sum(), len(losses)))
        norm = fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        assert float(full(norm)) == pytest.approx(norms[0], rel=1e-3)
        assert_weights(_Holder(model), wanted, 1e-5)


class _Holder:
    def __init__(self, net: nn.Module) -> None:
        self.net = net


def _check_weighted_loss_on_one_rank() -> None:
    for clips in (False, True):
        plugin = MixedPrecision("bf16-mixed")
        fabric = make_fabric(plugin)
        model, optimizer = set_up(fabric, sgd)
        losses = per_sample(model, batch(0, rank()))
        fabric.backward(losses.mean() if rank() else plugin.weighted_loss(losses.sum(), 4))
        own = "no" if rank() else "yes"
        clip = partial(fabric.clip_gradients, model, optimizer, max_norm=MAX_NORM)
        with pytest.raises(TrainingError, match=rf"1 of 2 ranks use .*\(this rank: {own}\)"):
            (clip if clips else optimizer.step)()


def _check_mixed_up_calls() -> None:
    """Errors are raised on all ranks, also if one rank makes the mistake."""
    plugin = MixedPrecision("bf16-mixed")
    fabric = make_fabric(plugin)
    model, optimizer = set_up(fabric, sgd)

    def backward(*, weighted: bool) -> None:
        losses = per_sample(model, batch(0, rank()))
        mean = plugin.weighted_loss(losses.sum(), 4) if weighted else losses.mean()
        fabric.backward(mean)

    for weighted in (False, True):
        backward(weighted=weighted)
        optimizer.step()
    backward(weighted=rank() == 0)
    with pytest.raises(TrainingError, match=r"on 1 rank\(s\) the step has a different number"):
        optimizer.step()
    fabric.backward(plugin.weighted_loss(model(batch(0, rank())).sum(), -1 if rank() else 9))
    with pytest.raises(TrainingError, match="summed over all ranks, is nan; weights have to be"):
        optimizer.step()
    optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    fabric.backward(plugin.weighted_loss(model(batch(0, rank())).sum(), 0))
    with mock.patch.object(logging.getLogger("distmp"), "warning") as warning:
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # without a loss, as when `training_step` returns None
    warning.assert_called_once()
    assert "is 0, so its gradient is zero" in warning.call_args.args[0]
    assert all(map(torch.equal, before, model.parameters()))
    with pytest.warns(RuntimeWarning, match="weighted_loss divides the loss by its weight, but"):
        plugin.weighted_loss(model(batch(0, rank())).mean(), 4)
    with pytest.warns(RuntimeWarning, match="weighted_loss is divided before backward"):
        fabric.backward(plugin.weighted_loss(model(batch(0, rank())).sum(), 4) / 2)
    plugin._weights.begin_step()
    backward(weighted=True)
    with pytest.raises(ConfigError, match="is the second optimizer"):
        fabric.setup_optimizers(sgd(model.parameters())).step()
    with pytest.raises(ConfigError, match="pass the sum of the losses, a 0-dim tensor"):
        plugin.weighted_loss(torch.ones(2), 2)
    for weight in (torch.tensor([3.0, 4.0]), [3, 4], "3"):
        with pytest.raises(ConfigError, match=r"^weight = .* must (be|have) .*one"):
            plugin.weighted_loss(torch.ones(()), weight)  # type: ignore[arg-type]

    lbfgs = fabric.setup_optimizers(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ConfigError, match="computes several gradients in one step"):
        lbfgs.step(lambda: 0.0)

    plugin = MixedPrecision("16-mixed")
    fabric = make_fabric(plugin)
    model, optimizer = set_up(fabric, sgd)
    for _ in range(2):
        fabric.backward(model(batch(0, rank())).sum())
        if plugin._unscaled:
            with pytest.raises(TrainingError, match="a mix of scaled and unscaled ones"):
                optimizer.step()
        else:
            fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
            optimizer.zero_grad()  # and no step
    plugin.device = "cuda"
    with pytest.raises(ConfigError, match="the loss is on cpu"):
        fabric.backward(model(batch(0, rank())).sum())


class TwiceSGD(torch.optim.SGD):
    """Needs a closure, and calls it twice, the second time for half the learning rate."""

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        for _ in range(2):
            loss = closure()
            super().step()
            self.param_groups[0]["lr"] /= 2
        return loss


def _check_closure(*, weighted: bool) -> None:
    """Without a loss scale, the optimizer gets the closure, and weighted gradients of each call."""
    sizes = (1, 5)
    plugin = MixedPrecision("fp32")
    fabric = make_fabric(plugin)
    model, optimizer = set_up(fabric, partial(TwiceSGD, lr=LR))

    def closure() -> float:
        optimizer.zero_grad()
        losses = per_sample(model, batch(0, rank(), sizes[rank()]))
        mean = losses.sum() * 2 / sum(sizes)
        fabric.backward(plugin.weighted_loss(losses.sum(), len(losses)) if weighted else mean)
        return mean.item()

    assert optimizer.step(closure) > 0
    wanted, _ = reference([[batch(0, r, sizes[r]) for r in range(2)]] * 2)
    assert_weights(_Holder(model), wanted, 1e-5)


def _check_models_that_contradict_the_policy() -> None:
    plain, bf16 = MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16)
    cases = (
        ("bf16", "ddp", "which need ModelParallelStrategy and fully_shard; .*bf16-autocast"),
        ("bf16", sharding(plain), "gathers float32 and reduces in float32, but the policy bf16"),
        ("bf16", sharding(bf16), "gathers bfloat16 and reduces in bfloat16"),
        ("fp32", sharding(bf16), "but the policy fp32 gathers float32"),
        ("fp32", sharding(plain, root=False), "is not sharded although other parameters are"),
    )
    for policy, strategy, problem in cases:
        fabric = make_fabric(MixedPrecision(policy), strategy)
        model, optimizer = set_up(fabric, sgd)
        fabric.backward(model(batch(0, rank())).float().sum())
        with pytest.raises(ConfigError, match=problem):
            optimizer.step()


def _check_weights_that_are_unfrozen_later() -> None:
    """DDP does not reduce their gradients; FSDP2 does."""
    strategies = {"DDP": "ddp", "FSDP2": sharding(MixedPrecisionPolicy())}
    for name, strategy in strategies.items():
        fabric, net = make_fabric(MixedPrecision("fp32", "cpu"), strategy), make_net()
        net[0].requires_grad_(False)
        model = fabric.setup_module(net)
        net.requires_grad_(True)
        loss = per_sample(model, batch(0, rank())).mean()
        if name == "FSDP2":
            fabric.backward(loss)
            continue
        with pytest.raises(ConfigError, match=r"model = '0.*: was frozen when DDP wrapped"):
            fabric.backward(loss)


@pytest.mark.nightly
@ranks(1)
def test_pytorch_lightning_package_is_supported() -> None:
    """Its Trainer accepts the plugin, also a pickled one, and one of both packages is chosen."""
    with pytest.raises(ConfigError, match="no package of Lightning is imported"):
        MixedPrecision("fp32")
    pl = importlib.import_module("pytorch_lightning")
    plugin = pickle.loads(pickle.dumps(MixedPrecision("16-mixed", loss_scale=RULES)))
    assert isinstance(plugin, MixedPrecision)
    module = make_module(pl, sgd)
    trainer = make_trainer(pl, plugin, 2, strategy="auto", gradient_clip_val=MAX_NORM)
    trainer.fit(module, loader([batch(step, 0) for step in range(2)]))
    assert_weights(module, reference([[batch(step, 0)] for step in range(2)], MAX_NORM)[0], 1e-4)
    sys.modules["lightning.fabric"] = sys.modules["lightning_fabric"]
    with pytest.raises(ConfigError, match=r"lightning\.fabric and pytorch_lightning is imported"):
        MixedPrecision("fp32")
    chosen = MixedPrecision("fp32", package="pytorch_lightning")
    for each in (chosen, copy.deepcopy(chosen)):
        assert isinstance(each, pl.plugins.Precision)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("bf16-pure", "would sum its gradients in 16 bits"),
        ("bf16-autocast,reduce=bf16", "use reduce=fp32"),
        ("bf16-autocast,output=bf16", "use output=fp32"),
        ("bf16,keep_fp32=norm", "set them with fully_shard"),
        ("fp32,loss_scale=8", "remove loss_scale"),
        ("fp8", "only distmp.Engine and the trainer compute; .* here 'bf16'"),
        ("mxfp8,autocast=true", "or here 'bf16-autocast'"),
        ("16-true", "use 'fp16-autocast', which trains FP32 weights"),
    ],
)
def test_policy_unsupported_by_lightning_is_refused(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        resolved(name, torch.device("cpu"))


def test_plugin_without_teardown_restores_switches_before_torch_is_gone(tmp_path: Path) -> None:
    code = """
import torch, lightning_fabric
from distmp.integrations.lightning import MixedPrecision
plugin = MixedPrecision("bf16-autocast", "cpu")
plugin.convert_module(torch.nn.Linear(2, 2))
"""
    done = run(python("-c", code), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@ranks(1)
def test_16_bit_weight_that_is_unfrozen_later_is_refused() -> None:
    importlib.import_module("lightning_fabric")
    plugin = MixedPrecision("bf16-mixed", "cpu")
    model = plugin.convert_module(nn.Linear(2, 2).bfloat16().requires_grad_(False))
    plugin.teardown()
    model.weight.requires_grad_(True)
    loss = model.weight.sum()
    with pytest.raises(ConfigError, match="model = 'weight': is bfloat16, because it was frozen"):
        plugin.backward(loss, model)


@pytest.mark.gpu
def test_step_weights_divide_gradients_on_gpu() -> None:
    weights, model = StepWeights(), make_net().cuda()
    optimizer = sgd(model.parameters())
    for index, size in enumerate((1, 5)):
        losses = per_sample(model, batch(index, 0, size).cuda())
        weights.loss(losses.sum(), torch.tensor(size, device="cuda")).backward()
        weights.count_backward(losses.sum())
    weights.divide(optimizer)
    optimizer.step()
    wanted, _ = reference([[batch(0, 0, 1), batch(1, 0, 5)]])
    assert_weights(_Holder(model.cpu()), wanted, 1e-5)


def test_lightning_without_clipping_hook_is_one_message() -> None:
    plugin = object.__new__(MixedPrecision)
    with pytest.raises(ConfigError, match="have no _after_closure, where distmp unscales gradient"):
        plugin.connect(nn.Linear(2, 2), [], [])


def test_deepspeed_is_refused() -> None:
    engine = type("DeepSpeedEngine", (nn.Linear,), {"__module__": "deepspeed.runtime"})(1, 1)
    with pytest.raises(ConfigError, match="casts, reduces and scales on its own"):
        check_parallel(engine, PRESETS["fp32"])


@ranks(1)
def test_errors_name_arguments() -> None:
    importlib.import_module("lightning_fabric")
    for arguments, setting in (
        (("fp99",), "policy"),
        (("fp16-autocast", "cpu"), "loss_scale"),
    ):
        with pytest.raises(ConfigError) as caught:
            MixedPrecision(*arguments, loss_scale=128.0)
        assert caught.value.setting == setting


@ranks(1)
def test_scale_rules_without_loss_scale_are_reported() -> None:
    importlib.import_module("lightning_fabric")
    with mock.patch.object(logging.getLogger("distmp"), "warning") as warned:
        assert MixedPrecision("fp32", "cpu", loss_scale=RULES).scaler is None
        assert "init" in str(warned.call_args)
        scaler = MixedPrecision("fp16-autocast", "cpu", loss_scale=RULES).scaler
    assert warned.call_count == 1
    assert scaler is not None
    assert scaler.get_scale() == RULES.init


def test_lightning_names_and_auto_become_policies() -> None:
    names = {
        name: resolved(name, torch.device("cpu")).policy.name
        for name in ("16-mixed", "bf16-mixed", "32-true", "fp16", "auto")
    }
    assert names.pop("auto") in ("bf16-autocast", "fp32")
    assert [*names.values()] == ["fp16-autocast", "bf16-autocast", "fp32", "fp16"]
