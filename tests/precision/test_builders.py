from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from distmp.errors import ConfigError
from distmp.precision import PRESETS, PrecisionPolicy, policy
from distmp.precision.builders import (
    autocast_context,
    cast_inputs_and_outputs,
    ddp_comm_hook,
    fsdp1_policy,
    fsdp2_policy,
    prepare,
)
from tests.ranks import ranks
from tests.recording import Collectives

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Output(NamedTuple):
    hidden: Tensor
    extra: dict[str, Any]


class Module(nn.Module):
    """Records the dtypes of its inputs, and returns tensors of several kinds."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).to(dtype)
        self.seen: dict[str, Any] = {}

    def forward(
        self, x: Tensor, *, mask: Tensor, nested: dict[str, list[Tensor]], k: int
    ) -> Output:
        self.seen = {"x": x.dtype, "mask": mask.dtype, "nested": nested["a"][0].dtype, "k": k}
        hidden = self.linear(x)
        self.seen["hidden"] = hidden.dtype
        return Output(hidden, {"index": torch.arange(2), "name": "n", "list": [hidden * 2]})


def call(preset: PrecisionPolicy) -> tuple[Module, Output]:
    module = Module(preset.compute_dtype if preset.casts_parameters else FP32)
    cast_inputs_and_outputs(module, preset)
    with autocast_context(preset.high_precision, CPU):
        output = module(
            torch.ones(2, 3), mask=torch.tensor([True]), nested={"a": [torch.ones(2)]}, k=3
        )
    return module, output


@pytest.mark.parametrize("name", PRESETS)
def test_dtypes_inside_and_around_module_follow_policy(name: str) -> None:
    module, output = call(policy(name))
    compute = policy(name).compute_dtype
    inputs = compute if policy(name).casts_parameters else FP32
    assert module.seen == {
        "x": inputs,
        "mask": torch.bool,
        "nested": inputs,
        "k": 3,
        "hidden": compute,
    }
    assert type(output) is Output
    assert output.hidden.dtype == output.extra["list"][0].dtype == FP32
    assert output.extra["index"].dtype == torch.int64
    assert output.extra["name"] == "n"


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_output_dtype_can_be_set(dtype: torch.dtype) -> None:
    own = PrecisionPolicy("own", compute_dtype=BF16, output_dtype=dtype)
    assert call(own)[1].hidden.dtype == dtype


def test_float64_outputs_become_output_dtype() -> None:
    module = nn.Identity()
    cast_inputs_and_outputs(module, policy("fp32"))
    assert module(torch.ones(1, dtype=torch.float64)).dtype == FP32


@pytest.mark.parametrize(("name", "dtype"), [("bf16-autocast", BF16), ("fp16-autocast", FP16)])
def test_autocast_uses_16_bit_matmuls_and_fp32_losses(name: str, dtype: torch.dtype) -> None:
    linear = nn.Linear(3, 3)
    seen = []
    linear.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with autocast_context(policy(name), CPU):
        loss = nn.functional.cross_entropy(linear(torch.ones(2, 3)), torch.tensor([0, 1]))
    assert seen == [dtype]
    assert loss.dtype == linear.weight.dtype == FP32
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_other_policies_have_no_autocast(name: str) -> None:
    with autocast_context(policy(name), CPU):
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("device", [CPU, torch.device("cpu", 0), "cpu:0"])
def test_devices_and_names_of_devices_are_accepted(device: torch.device | str) -> None:
    own = policy("bf16,keep_fp32=norm")
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    prepare(module, own, device)
    with autocast_context(own, device):
        assert module(torch.ones(2, 3)).dtype == FP32


@pytest.mark.parametrize("text", ["fp32", "bf16-autocast", "fp16"])
def test_conversion_of_parameters_that_share_memory_is_refused(text: str) -> None:
    model = sharing_memory()
    with pytest.raises(ConfigError, match=r"'0\.weight' and '1\.weight', which share memory"):
        prepare(model, policy(text), "cpu")
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()
    prepare(model, policy("bf16"), "cpu")  # nothing to convert


def sharing_memory() -> nn.Sequential:
    """Return a bfloat16 model with two parameters in the same memory."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).bfloat16()
    model[1].weight = nn.Parameter(model[0].weight.data)
    return model


def test_unknown_devices_are_refused() -> None:
    calls = (
        lambda: prepare(nn.Linear(3, 3), policy("bf16"), "cpuu"),
        lambda: autocast_context(policy("bf16"), "cpuu"),
    )
    for call in calls:
        with pytest.raises(ConfigError, match="device = 'cpuu': is not a device; use 'cpu'"):
            call()


@pytest.mark.parametrize("name", ["bf16-autocast", "fp16-autocast"])
def test_uses_of_one_weight_under_autocast_are_summed_in_fp32(name: str) -> None:
    linear = nn.Linear(1, 1, bias=False)
    with autocast_context(policy(name), CPU):
        torch.stack([linear(torch.ones(1)) for _ in range(4099)]).float().sum().backward()
    assert linear.weight.grad == 4099


@pytest.mark.parametrize("casts", [True, False])
def test_inputs_are_cast_according_to_policy(casts: bool) -> None:
    own = PrecisionPolicy("own", compute_dtype=BF16, cast_inputs=casts)
    module = nn.Identity()
    cast_inputs_and_outputs(module, own)
    seen = []
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    module(torch.ones(1))
    assert seen == [BF16 if casts else FP32]


class Expected(NamedTuple):
    """The result of each target for a policy; None if it is refused, or there is nothing to do."""

    autocast: torch.dtype | None
    gathered: torch.dtype | None  # parameters, by FSDP
    reduced: torch.dtype
    buffers: torch.dtype | None
    fsdp_refused: bool = False
    ddp_refused: bool = False
    ddp_sends: torch.dtype | None = None  # by the hook; None: DDP's own reduction


EXPECTED = {
    "fp32": Expected(None, None, FP32, None),
    "tf32": Expected(None, None, FP32, None),
    "bf16": Expected(None, BF16, FP32, None, ddp_refused=True),
    "bf16-autocast": Expected(BF16, None, FP32, None),
    "bf16-pure": Expected(None, BF16, FP32, None, fsdp_refused=True, ddp_refused=True),
    "fp16": Expected(None, FP16, FP32, None, ddp_refused=True),
    "fp16-autocast": Expected(FP16, None, FP32, None),
    "fp16-static": Expected(None, FP16, FP32, None, ddp_refused=True),
    # Changed in fields that a target could ignore.
    "fp32,reduce=bf16": Expected(None, None, BF16, None, ddp_sends=BF16),
    "bf16-autocast,reduce=bf16": Expected(BF16, None, BF16, None, ddp_sends=BF16),
    "bf16,reduce=bf16,buffer=bf16": Expected(None, BF16, BF16, BF16, ddp_refused=True),
    "bf16-pure,accumulate=bf16": Expected(None, BF16, FP32, None, ddp_sends=FP32),
    "bf16-pure,accumulate=bf16,reduce=bf16": Expected(None, BF16, BF16, None),
    "fp16-autocast,reduce=fp16,buffer=fp32": Expected(FP16, None, FP16, FP32, ddp_sends=FP16),
}


def test_every_preset_is_expected() -> None:
    wide = {name for name, preset in PRESETS.items() if not preset.has_low_precision_matmuls}
    assert wide < set(EXPECTED)


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        *((name, "bf16") for name, preset in PRESETS.items() if preset.has_low_precision_matmuls),
        ("mxfp8,autocast=true", "bf16-autocast"),
        ("fp8,reduce=bf16", "compute=bf16,reduce=bf16"),
    ],
)
def test_low_precision_matmuls_are_refused_in_one_message(text: str, instead: str) -> None:
    built, module = policy(text), nn.Linear(16, 16)
    builders: list[Callable[[], Any]] = [
        lambda: autocast_context(built, CPU),
        lambda: fsdp1_policy(built),
        lambda: fsdp2_policy(built),
        lambda: ddp_comm_hook(built),
        lambda: prepare(module, built, "cpu"),
    ]
    for build in builders:
        with pytest.raises(ConfigError) as caught:
            build()
        assert str(caught.value) == (
            f"precision.policy = {text!r}: has matrix products with fewer than 16 bits, which only "
            f"distmp.Engine and the trainer compute; use one of them, or here {instead!r}"
        )
    # What the message suggests has the same dtypes.
    assert replace(policy(instead), name=built.name) == built.high_precision
    assert module.weight.dtype == FP32


@pytest.mark.parametrize(("text", "expected"), EXPECTED.items(), ids=EXPECTED)
def test_builders_apply_every_policy_field(text: str, expected: Expected) -> None:
    built = policy(text)
    context = autocast_context(built, CPU)
    if expected.autocast is None:
        assert isinstance(context, contextlib.nullcontext)
    else:
        assert isinstance(context, torch.autocast)
        assert (context.device, context.fast_dtype) == ("cpu", expected.autocast)
    if expected.fsdp_refused:
        for build in (fsdp1_policy, fsdp2_policy):
            with pytest.raises(ConfigError, match="use accumulate=bf16, or param=fp32"):
                build(built)
    assert vars(fsdp2_policy(built, own_accumulator=expected.fsdp_refused)) == {
        **vars(MixedPrecisionPolicy()),  # newer versions of torch have more fields
        "param_dtype": expected.gathered,
        "reduce_dtype": expected.reduced,
        "output_dtype": None,
        "cast_forward_inputs": False,
    }
    if not expected.fsdp_refused:
        assert vars(fsdp1_policy(built)) == {
            "param_dtype": expected.gathered,
            "reduce_dtype": expected.reduced,
            "buffer_dtype": expected.buffers,
            "keep_low_precision_grads": False,
            "cast_forward_inputs": False,
            "cast_root_forward_inputs": False,
            "_module_classes_to_ignore": (),
        }
    if expected.ddp_refused:
        with pytest.raises(ConfigError, match="DistributedDataParallel sums them in the"):
            ddp_comm_hook(built)
    else:
        assert (ddp_comm_hook(built) is None) == (expected.ddp_sends is None)


@ranks(3)
def test_ddp_divides_16_bit_gradients_in_fp32() -> None:
    every = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    hook = ddp_comm_hook(policy("bf16-pure,accumulate=bf16"))
    assert hook is not None
    own = every[dist.get_rank()].clone()
    found = hook(None, SimpleNamespace(buffer=lambda: own)).wait()
    # The gradients are rounded once; ties may be rounded to the other side.
    assert (found == every.double().mean(0).bfloat16()).float().mean() > 0.99


@ranks(2)
def test_ddp_sends_reduce_dtype() -> None:
    rank = dist.get_rank()
    for text, expected in EXPECTED.items():
        built = policy(text)
        if expected.ddp_refused:
            continue
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        reference = copy.deepcopy(module).double()
        prepare(module, built, "cpu")
        parallel = nn.parallel.DistributedDataParallel(module)
        hook = ddp_comm_hook(built)
        if hook is not None:
            parallel.register_comm_hook(dist.group.WORLD, hook)
        inputs = torch.randn(2, 3, 4)
        with autocast_context(built, CPU):
            loss = parallel(inputs[rank]).square().sum()
        with Collectives() as collectives:
            loss.backward()
        if hook is not None:  # DDP's reduction does not run in Python
            assert {dtype for dtype, _ in collectives.sent} == {expected.reduced}, text
        (reference(inputs.flatten(0, 1).double()).square().sum() / 2).backward()
        for parameter, exact in zip(module.parameters(), reference.parameters(), strict=True):
            assert parameter.grad is not None
            assert exact.grad is not None
            assert parameter.grad.dtype == built.module_dtype
            error = (parameter.grad.double() - exact.grad).norm() / exact.grad.norm()
            all_fp32 = built.compute_dtype == expected.reduced == FP32
            assert error < (1e-6 if all_fp32 else 2e-2), (text, error)
