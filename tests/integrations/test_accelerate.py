"""accelerate's loop with distmp's policy and scaler, on real ranks."""

from __future__ import annotations

import copy
import logging
import math
import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    PrecisionType,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.utils.data import DataLoader, TensorDataset

import distmp.integrations.accelerate
from distmp.errors import ConfigError
from distmp.integrations.accelerate import Accelerator
from distmp.precision import policy
from distmp.precision.builders import fsdp1_policy
from distmp.scaling.grad_scaler import DistributedGradScaler
from distmp.scaling.settings import LossScaleConfig
from tests.marks import nightly
from tests.ranks import ranks, same_on_all_ranks
from tests.reference import gathered
from tests.torchrun import python, run

ROOT = Path(__file__).parents[2]
RULES = LossScaleConfig(init=2.0**8)


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 8, generator=generator)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 1))


@ranks(2)
def test_overflow_on_one_rank_skips_all() -> None:
    """The infinity is in a parameter that DDP does not reduce, so only one rank sees it."""
    for fused in (True, False):
        accelerator = Accelerator("fp16-autocast", loss_scale=RULES)
        assert isinstance(accelerator.scaler, DistributedGradScaler)
        model = make_model()
        model._ddp_params_and_buffers_to_ignore = ["3.bias"]  # type: ignore[assignment]
        adam = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        schedule = torch.optim.lr_scheduler.ExponentialLR(adam, 0.5)
        model, optimizer, scheduler = accelerator.prepare(model, adam, schedule)
        reported = []
        for step in range(4):
            optimizer.zero_grad()
            output = model(batch(step, accelerator.process_index))
            assert output.dtype == torch.float32
            accelerator.backward(output.square().mean())
            if step == 1 and accelerator.process_index == 1:
                model.module[3].bias.grad.fill_(torch.inf)
            optimizer.step()
            scheduler.step()
            scaler = accelerator.scaler
            reported.append(
                (
                    optimizer.step_was_skipped,
                    scaler.get_scale(),
                    scaler.total_skips,
                    scaler.consecutive_skips,
                )
            )
        assert reported == [
            (False, 256, 0, 0),
            (True, 128, 1, 1),
            (False, 128, 1, 0),
            (False, 128, 1, 0),
        ]
        assert scheduler.get_last_lr()[0] == pytest.approx(0.1 * 0.5**6)  # twice per step: 2 ranks
        weights = {k: v for k, v in model.module.state_dict().items() if k != "3.bias"}
        assert same_on_all_ranks([value.tolist() for value in weights.values()])
        AcceleratorState._reset_state(reset_partial_state=True)


@ranks(1)
def test_each_optimizer_knows_whether_it_was_skipped() -> None:
    for registered in (False, True):
        accelerator = Accelerator("fp16-autocast", loss_scale=RULES)
        model = make_model()
        own = [torch.optim.SGD(model[part].parameters(), lr=0.1) for part in (0, 3)]
        schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in own]
        model, *prepared = accelerator.prepare(model, *own, *schedules)
        accelerator.scaler.register(*prepared[: 2 * registered])
        accelerator.backward(model(batch(0, 0)).square().mean())
        accelerator.unwrap_model(model)[0].weight.grad.fill_(torch.inf)
        for each in prepared:
            each.step()
        assert [each.step_was_skipped for each in prepared[:2]] == [True, registered]
        assert [each.get_last_lr() for each in prepared[2:]] == [
            [0.1],
            [0.1 if registered else 0.05],
        ]
        AcceleratorState._reset_state(reset_partial_state=True)


@ranks(1)
def test_two_optimizers_of_one_backward_share_scale() -> None:
    """The scale doubles at every step, and is updated and read between the optimizers."""
    reference = make_model()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    rules = LossScaleConfig(init=2.0**4, growth_interval=1)
    accelerator = Accelerator("fp16-autocast", loss_scale=rules)
    model = make_model()
    optimizers = [torch.optim.SGD(model[index].parameters(), lr=0.1) for index in (0, 2, 3)]
    model, *prepared = accelerator.prepare(model, *optimizers)
    for step in range(3):
        for optimizer in (plain, *prepared):
            optimizer.zero_grad()
        reference(batch(step, 0)).square().mean().backward()
        accelerator.backward(model(batch(step, 0)).square().mean())
        for optimizer in (plain, *prepared):
            optimizer.step()
            state = accelerator.scaler.state_dict()
            assert state["scale"] == accelerator.scaler.get_scale()
    assert (state["scale"], state["total_skips"]) == (2.0**7, 0)
    for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=5e-3)


def _train_with_reference(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, reference: nn.Module
) -> Tensor:
    """Take two steps, and let plain torch train `reference` on the batches of both ranks.

    Returns:
        The last output of the model.
    """
    plain = torch.optim.AdamW(reference.parameters(), lr=0.1)
    for step in range(2):
        output = model(batch(step, accelerator.process_index))
        accelerator.backward(output.square().mean())
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
        both = reference(torch.cat([batch(step, rank) for rank in range(2)]))
        both.square().mean().backward()
        plain.step()
    return output


@pytest.mark.parametrize("version", [1, nightly(2)])
@ranks(2)
def test_fsdp_dtypes_follow_policy(version: int) -> None:
    _let_accelerate_shard_on_cpu()
    cases = {
        "fp32": (torch.float32, torch.float32),
        "bf16-pure,accumulate=bf16": (torch.bfloat16, torch.bfloat16),
        "bf16": (torch.bfloat16, torch.bfloat16),
        "bf16-autocast": (torch.float32, torch.bfloat16),
        "fp16": (torch.float16, torch.float16),
    }
    for name, (parameter, computed) in cases.items():
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
        with mock.patch.object(torch.accelerator, "is_available", return_value=True):
            accelerator = Accelerator(name, loss_scale=RULES, fsdp_plugin=plugin)
        assert accelerator.distributed_type == DistributedType.FSDP
        module = make_model().bfloat16()  # trained parameters become FP32, exactly
        seen: list[torch.dtype] = []
        module[0].register_forward_hook(_recorder(seen))
        if version == 2:
            adam = torch.optim.AdamW(module.parameters(), lr=0.1)
            model, optimizer = accelerator.prepare(module, adam)
        else:
            model = accelerator.prepare(module)
            optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
        reference = make_model().bfloat16().float()
        output = _train_with_reference(accelerator, model, optimizer, reference)
        assert output.dtype == torch.float32
        assert seen[:2] == [parameter, computed], name
        stored = torch.bfloat16 if "pure" in name else torch.float32
        assert {value.dtype for value in model.parameters()} == {stored}
        final = reference(batch(9, 0))
        rounding = {} if name == "fp32" else {"rtol": 0.1, "atol": 0.1}
        torch.testing.assert_close(model(batch(9, 0)), final, **rounding)
        weights = gathered(dict(model.named_parameters()))
        assert all(isinstance(weight, Tensor) for weight in weights.values())
        AcceleratorState._reset_state(reset_partial_state=True)


@ranks(2)
def test_step_that_creates_optimizer_states_is_no_iteration() -> None:
    """torch takes it with learning rates of 0 and zero gradients; a warmup starts with 0, too."""
    _let_accelerate_shard_on_cpu()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    with mock.patch.object(torch.accelerator, "is_available", return_value=True):
        accelerator = Accelerator("fp16", loss_scale=RULES, fsdp_plugin=plugin)
    module = make_model()
    sgd = torch.optim.SGD(module.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(module, sgd)
    for step, overflows in enumerate((False, True, False)):
        state = get_optimizer_state_dict(model, optimizer)
        set_optimizer_state_dict(model, optimizer, state)
        loss = model(batch(step, accelerator.process_index)).square().mean()
        accelerator.backward(loss * (math.inf if overflows else 1))
        optimizer.step()
        assert optimizer.step_was_skipped == overflows
        optimizer.zero_grad()
        found = accelerator.scaler.state_dict()
        assert found["_growth_tracker"] == int(not overflows)
    assert accelerator.scaler.total_skips == 1


@ranks(2)
def test_fsdp2_keeps_frozen_16_bit_weights() -> None:
    """A frozen base, such as that of LoRA, in one shard with trained FP32 weights."""
    _let_accelerate_shard_on_cpu()
    frozen = {"bf16": torch.bfloat16, "bf16-autocast": torch.bfloat16, "fp32": torch.float32}
    for name, dtype in frozen.items():
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        with mock.patch.object(torch.accelerator, "is_available", return_value=True):
            accelerator = Accelerator(name, fsdp_plugin=plugin)
        module, reference = _with_a_frozen_base(), _with_a_frozen_base().float()
        base = module[0].weight.clone()
        adam = torch.optim.AdamW(module.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(module, adam)
        _train_with_reference(accelerator, model, optimizer, reference)
        held: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
        for parameter in model.parameters():
            held[parameter.requires_grad].add(parameter.dtype)
        assert held == {True: {torch.float32}, False: {dtype}}, name
        torch.testing.assert_close(model(batch(9, 0)), reference(batch(9, 0)), rtol=0.1, atol=0.1)
        weights = gathered(dict(model.named_parameters()))
        assert torch.equal(weights["0.weight"].to(base), base)
        AcceleratorState._reset_state(reset_partial_state=True)


def _with_a_frozen_base() -> nn.Sequential:
    model = make_model()
    model[0].bfloat16().requires_grad_(False)
    return model


@pytest.mark.parametrize("version", [1, 2])
@ranks(2)
def test_fsdp_dtypes_follow_mixed_precision(version: int) -> None:
    """FP32 weights under autocast, reduced in FP32; accelerate would use 16 bits for both."""
    _let_accelerate_shard_on_cpu()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    with mock.patch.object(torch.accelerator, "is_available", return_value=True):
        accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    assert accelerator.policy == policy("bf16-autocast")
    assert accelerator.distributed_type == DistributedType.FSDP
    assert plugin.mixed_precision_policy.param_dtype is None
    assert plugin.mixed_precision_policy.reduce_dtype == torch.float32
    module = make_model()
    seen: list[torch.dtype] = []
    module[0].register_forward_hook(_recorder(seen))
    if version == 2:
        model, _ = accelerator.prepare(module, torch.optim.AdamW(module.parameters()))
    else:
        model = accelerator.prepare(module)
    assert model(batch(0, accelerator.process_index)).dtype == torch.float32
    assert seen == [torch.float32, torch.bfloat16]
    AcceleratorState._reset_state(reset_partial_state=True)


@ranks(2)
def test_16_bit_accumulation_is_refused() -> None:
    """Also if accumulation starts after the Accelerator was created."""
    _let_accelerate_shard_on_cpu()

    def build(text: str, version: int) -> Accelerator:
        AcceleratorState._reset_state(reset_partial_state=True)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
        with mock.patch.object(torch.accelerator, "is_available", return_value=True):
            accelerator = Accelerator(text, fsdp_plugin=plugin)
        accelerator.gradient_accumulation_steps = 2
        return accelerator

    for text, version in (("bf16", 1), ("bf16,reduce=bf16", 2), ("fp32,reduce=bf16", 2)):
        accelerator = build(text, version)
        problem = pytest.raises(ConfigError, match="would sum microbatches in bfloat16")
        with problem as caught, accelerator.accumulate(nn.Linear(2, 2)):
            pass
        assert caught.value.setting == "gradient_accumulation_plugin.sync_each_batch"
    for text, version in (("bf16", 2), ("bf16-autocast", 1), ("fp32", 1)):
        build(text, version).no_sync(nn.Linear(2, 2))


def _let_accelerate_shard_on_cpu() -> None:
    """accelerate does this only on GPUs; the code is the same."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)


def _recorder(seen: list[torch.dtype]) -> Callable[..., None]:
    return lambda module, _, output: seen.extend([module.weight.dtype, output.dtype])


@ranks(2)
def test_ddp_applies_every_policy_field() -> None:
    before = torch.get_float32_matmul_precision()
    text = "bf16-autocast,keep_fp32=norm,reduce=bf16,buffer=fp32"
    accelerator = Accelerator(text, loss_scale=RULES)
    assert accelerator.scaler is None
    model = make_model()
    model.register_buffer("table", torch.zeros(2, dtype=torch.bfloat16))
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(_recorder(seen))
    model[2].register_forward_hook(_recorder(seen))
    model = accelerator.prepare_model(model)
    output = model(batch(0, dist.get_rank()).double())  # cast to the dtype of the parameters
    accelerator.backward(output.square().mean())
    assert output.dtype == torch.float32
    assert seen == [torch.float32, torch.bfloat16, torch.float32, torch.float32]
    assert model.module.table.dtype == torch.float32
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(gradient, gradient.bfloat16().float()) for gradient in gradients)
    assert same_on_all_ranks([gradient.tolist() for gradient in gradients])
    accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # it left

    accelerator = Accelerator("tf32")
    assert torch.get_float32_matmul_precision() == "high"
    accelerator.end_training()
    assert torch.get_float32_matmul_precision() == before


@ranks(2)
def test_process_group_is_destroyed_before_model() -> None:
    """On one core the thread of the group is often late, and so is the last collective."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    def train() -> None:
        accelerator = Accelerator("fp32")
        model = accelerator.prepare_model(nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        for _ in range(3):
            dist.all_reduce(torch.ones(4))
        accelerator.end_training()

    train()


@ranks(1)
def test_settings_that_override_policy_are_refused() -> None:
    compressed = DistributedDataParallelKwargs(comm_hook="fp16")
    cases: tuple[tuple[Any, dict[str, Any], str, str], ...] = (
        ("fp99", {}, "policy", "fp99"),
        ("bf16", {}, "policy", "use a policy with autocast"),
        ("bf16-pure", {}, "policy", "sums microbatches in float32"),
        ("bf16-autocast,output=bf16", {}, "policy.output", "in float32"),
        ("bf16-autocast", {"mixed_precision": "fp16"}, "mixed_precision", "policy = 'bf16-auto"),
        ("fp32", {"mixed_precision": "no"}, "mixed_precision", "give one of the two"),
        (True, {}, "policy", "True"),
        ("fp32", {"deepspeed_plugin": object()}, "deepspeed_plugin", "the policy and the scaler"),
        (
            "fp32",
            {"deepspeed_plugins": {"a": object()}},
            "deepspeed_plugin",
            "the policy and the scaler",
        ),
        (
            "fp32",
            {"megatron_lm_plugin": object()},
            "megatron_lm_plugin",
            "the policy and the scaler",
        ),
        ("fp32", {"kwargs_handlers": [AutocastKwargs()]}, "kwargs_handlers", "remove it"),
        ("fp32", {"kwargs_handlers": [GradScalerKwargs()]}, "kwargs_handlers", "LossScaleConfig"),
        ("fp32", {"kwargs_handlers": [compressed]}, "kwargs_handlers", "this hook does not"),
        # accelerate ignores the plugin on a CPU.
        ("bf16", {"fsdp_plugin": FullyShardedDataParallelPlugin()}, "fsdp_plugin", "whole model"),
        ("fp16-autocast", {"loss_scale": 128.0}, "loss_scale", "pass distmp.LossScaleConfig"),
        ("16-true", {}, "policy", "use 'fp16-autocast', which trains FP32 weights"),
        ("fp16-mixed", {}, "policy", "use 'fp16-autocast', which trains FP32 weights"),
    )
    for name, arguments, setting, message in cases:
        with pytest.raises(ConfigError, match=message) as caught:
            Accelerator(name, **arguments)
        assert caught.value.setting == setting


@ranks(1)
def test_gradients_that_are_still_scaled_are_noticed() -> None:
    clip = torch.nn.utils.clip_grad_norm_

    def train(*, prepares: bool, fused: bool, clips: Callable[..., Any] | None) -> list[str]:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator("fp16-autocast", gradient_accumulation_steps=2)
        model: Any = make_model()
        optimizer: Any = torch.optim.AdamW(model.parameters(), fused=fused)
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer) if prepares else optimizer
        with mock.patch.object(logging.getLogger("distmp"), "warning") as warning:
            for step in range(4):
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch(step, 0)).square().mean())
                    if accelerator.sync_gradients:
                        (accelerator.clip_grad_norm_ if clips is None else clips)(
                            model.parameters(), 0.1
                        )
                        optimizer.step()
                        optimizer.zero_grad()
        return [call.args[0] for call in warning.call_args_list]

    for fused in (False, True):
        assert train(prepares=True, fused=fused, clips=None) == []
        (message,) = train(prepares=True, fused=fused, clips=clip)
        assert "clip them with accelerator.clip_grad_norm_" in message
        with pytest.raises(ConfigError, match=r"optimizer = 'AdamW': .*pass it to accelerator"):
            train(prepares=False, fused=fused, clips=clip)


@ranks(1)
def test_closure_is_refused_with_a_loss_scale() -> None:
    """Also at a step that accelerate leaves out because it accumulates."""
    for policy_name in ("fp16-autocast", "bf16-autocast"):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(policy_name, gradient_accumulation_steps=2)
        model: Any = make_model()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        for step in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch(step, 0)).square().mean())
                if policy_name == "bf16-autocast":
                    optimizer.step(lambda: None)
                    continue
                with pytest.raises(ConfigError, match=r"closure = .*call closure\(\) yourself"):
                    optimizer.step(lambda: None)


@ranks(1)
def test_reading_the_scale_does_not_allow_an_unprepared_optimizer() -> None:
    accelerator = Accelerator("fp16-autocast", loss_scale=RULES)
    model = make_model()
    own = [torch.optim.SGD(model[part].parameters(), lr=0.1) for part in (0, 3)]
    model, prepared = accelerator.prepare(model, own[0])
    accelerator.backward(model(batch(0, 0)).square().mean())
    prepared.step()
    accelerator.scaler.get_scale()
    with pytest.raises(ConfigError, match=r"optimizer = 'SGD': .*pass it to accelerator"):
        own[1].step()


@ranks(1)
def test_parameters_outside_of_a_model_need_a_prepared_optimizer() -> None:
    """A model that only a loss of its own trains does not need one."""
    accelerator = Accelerator("fp16-autocast", loss_scale=RULES)
    module, probe, center = make_model(), nn.Linear(1, 1), torch.zeros(1, requires_grad=True)
    sgd = [torch.optim.SGD(each, lr=0.1) for each in (module.parameters(), probe.parameters())]
    model, optimizer = accelerator.prepare(module, sgd[0])
    other = torch.optim.SGD([center], lr=0.1)
    output = model(batch(0, 0))
    accelerator.backward((output - center).square().mean())
    for _ in range(2):
        probe(output.detach()).mean().backward()
        sgd[1].step()
        with pytest.raises(ConfigError, match=r"optimizer = 'SGD': .*pass it to accelerator"):
            other.step()
        optimizer.step()
        accelerator.backward((model(batch(1, 0)) - center).square().mean())
    assert center.item() == 0
    other.zero_grad()
    center.square().sum().add(center.sum()).backward()  # not scaled
    other.step()
    assert center.item() == pytest.approx(-0.1)
    other = accelerator.prepare(other)
    other.step()
    assert center.item() == pytest.approx(-0.1 - 0.1 / RULES.init, abs=1e-3)


@ranks(1)
def test_optimizers_with_a_backward_each_skip_separately() -> None:
    """Also with clipping, where accelerate unscales old gradients of the other optimizer too."""
    for clip in (None, "clip_grad_norm_", "clip_grad_value_"):
        accelerator = Accelerator("fp16-autocast", loss_scale=RULES)
        made = [make_model(), nn.Linear(1, 1)]
        sgd = [torch.optim.SGD(module.parameters(), lr=0.1) for module in made]
        generator, critic, *optimizers = accelerator.prepare(*made, *sgd)
        skipped = []
        with mock.patch.object(logging.getLogger("distmp"), "warning") as warning:
            for step in range(3):
                for number in (1, 0):
                    samples = generator(batch(step, 0))
                    loss = critic(samples.detach() if number else samples).mean()
                    optimizers[number].zero_grad()
                    accelerator.backward(loss * (math.inf if (step, number) == (1, 1) else 1))
                    if clip is not None:
                        getattr(accelerator, clip)(made[number].parameters(), 1.0)
                    optimizers[number].step()
                    skipped.append(optimizers[number].step_was_skipped)
        assert skipped == [False, False, True, False, False, False]
        assert warning.call_count == 0
        AcceleratorState._reset_state(reset_partial_state=True)


@ranks(1)
def test_zero_grad_frees_gradients_after_a_step() -> None:
    for fused in (False, True):
        accelerator = Accelerator("fp16-autocast", loss_scale=RULES)
        module = make_model()
        adam = torch.optim.AdamW(module.parameters(), fused=fused)
        model, optimizer = accelerator.prepare(module, adam)
        for step in range(2):
            accelerator.backward(model(batch(step, 0)).square().mean() * (step or math.inf))
            gradient = weakref.ref(module[0].weight.grad)
            optimizer.step()
            optimizer.zero_grad()
            assert gradient() is None
        AcceleratorState._reset_state(reset_partial_state=True)


@ranks(1)
def test_model_of_a_finished_training_can_be_trained_otherwise() -> None:
    accelerator = Accelerator("fp16-autocast", loss_scale=RULES)
    module = make_model()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    other = torch.optim.AdamW(module.parameters())
    accelerator.backward(model(batch(0, 0)).square().mean())
    optimizer.step()
    assert accelerator.scaler.get_scale() == RULES.init
    module.zero_grad()
    module(batch(1, 0)).square().mean().backward()
    other.step()
    accelerator.backward(model(batch(2, 0)).square().mean())
    with pytest.raises(ConfigError, match=r"optimizer = 'AdamW': .*pass it to accelerator"):
        other.step()


@ranks(1)
def test_state_without_scaler_starts_loss_scale_anew(tmp_path: Path) -> None:
    for name in ("bf16-autocast", "fp16-autocast"):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(name)
        module = make_model()
        model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters()))
        if name == "bf16-autocast":
            nn.init.constant_(module[0].bias, 3.0)
            accelerator.save_state(str(tmp_path))
    for step in range(2):
        accelerator.backward(model(batch(step, 0)).square().mean() * torch.inf)
        optimizer.step()
        optimizer.zero_grad()
    assert accelerator.scaler.get_scale() == 2.0**14
    with mock.patch.object(logging.getLogger("distmp"), "warning") as warning:
        accelerator.load_state(str(tmp_path), {})
    assert warning.call_count == 1
    assert module[0].bias.unique().item() == 3.0
    assert accelerator.scaler.get_scale() == 2.0**16
    assert accelerator.scaler.total_skips == 0
    accelerator.backward(model(batch(0, 0)).square().mean() / 2**16)
    optimizer.step()
    assert not optimizer.step_was_skipped


@ranks(1)
def test_auto_selects_policy_supported_by_accelerate() -> None:
    os.environ["ACCELERATE_MIXED_PRECISION"] = "fp16"
    accelerator = Accelerator("auto")
    assert not accelerator.policy.casts_parameters
    assert accelerator.policy_reason
    assert accelerator.mixed_precision in ("no", "bf16")


# mixed_precision in place of a policy: only the import changes


@ranks(1)
def test_mixed_precision_setting_becomes_policy() -> None:
    cases: tuple[tuple[tuple[Any, ...], dict[str, Any], str | None, str, str], ...] = (
        ((), {}, None, "fp32", "ACCELERATE_MIXED_PRECISION = 'no'"),
        ((), {"mixed_precision": None}, None, "fp32", "ACCELERATE_MIXED_PRECISION = 'no'"),
        ((), {"mixed_precision": "no"}, None, "fp32", "mixed_precision = 'no'"),
        ((), {"mixed_precision": "bf16"}, None, "bf16-autocast", "mixed_precision = 'bf16'"),
        ((), {"mixed_precision": "fp16"}, None, "fp16-autocast", "mixed_precision = 'fp16'"),
        ((), {"mixed_precision": PrecisionType.BF16}, None, "bf16-autocast", "= 'bf16'"),
        # Set by `accelerate launch --mixed_precision`; the argument of a script overrides it.
        ((), {}, "bf16", "bf16-autocast", "ACCELERATE_MIXED_PRECISION = 'bf16'"),
        ((), {}, "no", "fp32", "ACCELERATE_MIXED_PRECISION = 'no'"),
        ((), {"mixed_precision": "no"}, "bf16", "fp32", "mixed_precision = 'no'"),
        ((), {"policy": "fp32"}, "bf16", "fp32", "configured"),
        (("fp16-autocast",), {}, "bf16", "fp16-autocast", "configured"),
    )
    for positional, keywords, launched, name, reason in cases:
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
        if launched is not None:
            os.environ["ACCELERATE_MIXED_PRECISION"] = launched
        accelerator = Accelerator(*positional, **keywords)
        assert accelerator.policy == policy(name)
        assert reason in accelerator.policy_reason
        word = {"fp32": "no", "bf16-autocast": "bf16", "fp16-autocast": "fp16"}[name]
        assert accelerator.mixed_precision == word
        assert (accelerator.scaler is not None) == (word == "fp16")
        assert accelerator.device_placement
        AcceleratorState._reset_state()


@ranks(1)
def test_later_accelerator_uses_policy_of_first() -> None:
    first = Accelerator("bf16-autocast,keep_fp32=norm")
    assert Accelerator().policy == first.policy
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    assert Accelerator().policy == policy("bf16-autocast")


@ranks(1)
def test_precision_of_a_later_accelerator_is_refused() -> None:
    first, model = Accelerator("fp16-autocast"), make_model()
    AcceleratorState._reset_state()  # as new TrainingArguments do
    Accelerator("fp32")
    for use, argument in ((first.prepare_model, model), (first.backward, model(batch(0, 0)).sum())):
        with pytest.raises(ConfigError, match="another Accelerator uses 'no'; use another proc"):
            use(argument)


@ranks(1)
def test_unknown_precision_words_are_refused() -> None:
    for word, message in (("fp8", "choose one of"), ("bf61", "did you mean 'bf16'")):
        os.environ["ACCELERATE_MIXED_PRECISION"] = word
        for arguments, setting in (
            ({}, "ACCELERATE_MIXED_PRECISION"),
            ({"mixed_precision": word}, "mixed_precision"),
        ):
            with pytest.raises(ConfigError, match=message) as caught:
                Accelerator(**arguments)  # type: ignore[arg-type]
            assert (caught.value.setting, caught.value.value) == (setting, word)


@ranks(1)
def test_only_explicit_policy_changes_matmul_switches() -> None:
    torch.set_float32_matmul_precision("high")
    for arguments, expected in (({}, "high"), ({"policy": "fp32"}, "highest")):
        accelerator = Accelerator(**arguments)  # type: ignore[arg-type]
        assert torch.get_float32_matmul_precision() == expected
        accelerator.end_training()
        assert torch.get_float32_matmul_precision() == "high"
        AcceleratorState._reset_state(reset_partial_state=True)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # it left


@ranks(1)
def test_16_bit_weights_that_are_unfrozen_later_are_refused() -> None:
    for options in ({"mixed_precision": "bf16"}, {"policy": "fp16-autocast"}):
        for converts in (False, True):
            AcceleratorState._reset_state(reset_partial_state=True)
            accelerator = Accelerator(**options)
            model: Any = make_model().bfloat16()
            first = model[0].requires_grad_(False)
            if converts:
                first.float()
            model = accelerator.prepare(model)
            accelerator.backward(model(batch(0, 0)).square().mean())
            first.requires_grad_(True)
            loss = model(batch(0, 0)).square().mean()
            if converts:
                accelerator.backward(loss)
                assert first.weight.grad.dtype == torch.float32
                continue
            with pytest.raises(ConfigError, match=r"'0.*bfloat16.*call float\(\) on its module"):
                accelerator.backward(loss)


@ranks(2)
def test_weights_that_are_unfrozen_after_prepare_are_refused() -> None:
    """DDP does not reduce their gradients, unless it wraps the model again."""
    for prepares_again in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator()
        model: Any = make_model()
        model[0].requires_grad_(False)
        model = accelerator.prepare(model)
        copied = copy.deepcopy(model.module).requires_grad_(True)
        accelerator.backward(copied(batch(0, 0)).square().mean())
        model.requires_grad_(True)
        if prepares_again:
            model = accelerator.prepare(accelerator.unwrap_model(model))
        loss = model(batch(0, dist.get_rank())).square().mean()
        if prepares_again:
            accelerator.backward(loss)
            assert same_on_all_ranks([parameter.grad for parameter in model.parameters()])
            continue
        with pytest.raises(ConfigError, match=r"model = '0.*: was frozen.*unfreeze it before pre"):
            accelerator.backward(loss)


@pytest.mark.parametrize(
    ("dtype", "ending"),
    [
        (torch.bfloat16, "was bfloat16); policy='bf16-pure,accumulate=bf16' trains bfloat16 "),
        (torch.float16, "was float16)"),
    ],
)
@ranks(1)
def test_16_bit_weights_become_fp32_with_warning(dtype: torch.dtype, ending: str) -> None:
    with mock.patch.object(logging.getLogger("distmp"), "warning") as warning:
        accelerator = Accelerator()
        model = accelerator.prepare_model(make_model().to(dtype))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    (call,) = warning.call_args_list
    text = (call.args[0] % call.args[1:]).removesuffix("parameters as they are")
    assert text.endswith(f"6 parameters become float32 ('0.weight' {ending}")


def train(package: Any, *positional: Any, **keywords: Any) -> tuple[list[float], list[Tensor]]:
    """Run a script for accelerate, with the Accelerator of one package or the other."""
    torch.manual_seed(0)
    accelerator = package.Accelerator(
        *positional, cpu=True, gradient_accumulation_steps=2, **keywords
    )
    inputs = torch.randn(96, 8)
    data = DataLoader(TensorDataset(inputs, inputs.mean(1, keepdim=True)), batch_size=4)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    losses = []
    for inputs, targets in data:
        with accelerator.accumulate(model):
            output = model(inputs)
            assert output.dtype == torch.float32
            loss = nn.functional.mse_loss(output, targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    AcceleratorState._reset_state(reset_partial_state=True)
    return losses, weights


@pytest.mark.parametrize("world_size", [1, nightly(2)])
@ranks()
def test_training_agrees_with_accelerate_after_import_change(world_size: int) -> None:
    losses = {}
    for word in ("no", "bf16"):
        for launched in (False, True):
            os.environ["ACCELERATE_MIXED_PRECISION"] = word if launched else "no"
            keywords = {} if launched else {"mixed_precision": word}
            ours, our_weights = train(distmp.integrations.accelerate, **keywords)
            theirs, their_weights = train(accelerate, **keywords)
            assert ours == theirs
            assert all(map(torch.equal, our_weights, their_weights))
            assert len(ours) == 24 // world_size
            losses[word, launched] = ours
    assert losses["no", False] == losses["no", True]
    assert losses["bf16", False] == losses["bf16", True] != losses["no", True]


@pytest.mark.nightly
def test_example_skips_on_both_ranks(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "accelerate_fp16.py")
    done = run(launch(example, "--bad-batch-at", "4"), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    line = r"rank {} step (\d+) skipped=(\w+) scale=(\d+) lr=(0\.\d{{5}})"
    reported = [re.findall(line.format(rank), done.stdout) for rank in range(2)]
    assert len(reported[0]) == 10
    assert reported[0] == reported[1]
    assert [step for step, skipped, _, _ in reported[0] if skipped == "True"] == ["4"]
    assert [scale for _, _, scale, _ in reported[0]] == ["65536"] * 3 + ["32768"] * 7
    assert reported[0][3][3] == reported[0][2][3]  # the learning rate does not change
    assert reported[0][4][3] < reported[0][3][3]
    norms = re.findall(r"weights of norm (\d\.\d{8}e[+-]\d\d)", done.stdout)
    assert len(norms) == 2
    assert norms[0] == norms[1]


def launch(*arguments: str) -> list[str]:
    launcher = python("-m", "accelerate.commands.launch", "--multi-gpu", "--num-processes", "2")
    return [*launcher, "--main-process-port", "0", *arguments]


@ranks(2)
def test_accelerate_behaves_as_documented() -> None:
    """The second column of the table in docs/accelerate.md."""
    rank = dist.get_rank()
    alone = accelerate.Accelerator()
    assert alone.num_processes == 1  # two ranks on CPUs that are not connected
    AcceleratorState._reset_state(reset_partial_state=True)

    accelerator = accelerate.Accelerator(mixed_precision="fp16", cpu=True)
    assert accelerator.num_processes == 2
    assert accelerator.scaler is None
    model = accelerator.prepare_model(make_model())
    seen: list[torch.dtype] = []
    model.module[0].register_forward_hook(_recorder(seen))
    model(batch(0, 0))
    assert seen == [torch.float32, torch.float32]

    # As on a GPU.
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1)
    accelerator.native_amp = True
    model = make_model()
    model._ddp_params_and_buffers_to_ignore = ["3.bias"]  # type: ignore[assignment]
    adam = torch.optim.AdamW(model[0].parameters(), lr=0.1, fused=True)
    second = torch.optim.SGD(model[3].parameters(), lr=0.1)
    model, *optimizers = accelerator.prepare(model, adam, second)
    accelerator.backward(model(batch(0, rank)).square().mean())
    before, gradient = model.module[3].weight.clone(), model.module[3].weight.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    step = before - model.module[3].weight
    torch.testing.assert_close(step, 0.1 * gradient / 2.0**9)  # half of the correct step
    accelerator.backward(model(batch(1, rank)).square().mean())
    for parameter in (model.module[0].weight, model.module[3].bias):
        parameter.grad.fill_(torch.inf if rank == 1 else 1.0)
    for optimizer in optimizers:
        optimizer.step()
    fused, unfused = (optimizer.step_was_skipped for optimizer in optimizers)
    assert not fused
    assert unfused == (rank == 1)
    assert not same_on_all_ranks(accelerator.scaler.get_scale())
    AcceleratorState._reset_state(reset_partial_state=True)

    _let_accelerate_shard_on_cpu()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = accelerate.Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    assert plugin.mixed_precision_policy.reduce_dtype == torch.bfloat16
    plugin.mixed_precision_policy = MixedPrecisionPolicy()
    module = make_model()
    seen.clear()
    module[0].register_forward_hook(_recorder(seen))
    model, _ = accelerator.prepare(module, torch.optim.AdamW(module.parameters()))
    model(batch(0, 0))
    assert seen == [torch.float32, torch.float32]

    # FSDP1 with 16-bit parameters and any reduction dtype.
    wide = fsdp1_policy(policy("bf16"))
    sharded = FullyShardedDataParallel(
        make_model(), mixed_precision=wide, device_id=torch.device("cpu")
    )
    with sharded.no_sync():
        sharded(batch(0, 0).bfloat16()).square().mean().backward()
    (handle,) = sharded._all_handles
    assert handle.flat_param.grad.dtype == torch.bfloat16
