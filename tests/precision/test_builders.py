from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from distmp.precision import PRESETS, PrecisionPolicy, policy
from distmp.precision.builders import autocast_context, cast_inputs_and_outputs, fsdp2_policy

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Output(NamedTuple):
    hidden: Tensor
    extra: dict[str, Any]


class Module(nn.Module):
    """Notes the types that reach it, and returns a bit of everything."""

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
    with autocast_context(preset, CPU):
        output = module(
            torch.ones(2, 3), mask=torch.tensor([True]), nested={"a": [torch.ones(2)]}, k=3
        )
    return module, output


@pytest.mark.parametrize("name", PRESETS)
def test_types_in_and_around_the_module(name: str) -> None:
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
def test_output_type_can_be_chosen(dtype: torch.dtype) -> None:
    own = PrecisionPolicy("own", compute_dtype=BF16, output_dtype=dtype)
    assert call(own)[1].hidden.dtype == dtype


def test_double_outputs_become_those_of_the_policy() -> None:
    module = nn.Identity()
    cast_inputs_and_outputs(module, policy("fp32"))
    assert module(torch.ones(1, dtype=torch.float64)).dtype == FP32


@pytest.mark.parametrize(("name", "dtype"), [("bf16-autocast", BF16), ("fp16-autocast", FP16)])
def test_autocast_computes_matrix_products_in_16_bits_and_losses_in_32(
    name: str, dtype: torch.dtype
) -> None:
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


@pytest.mark.parametrize("name", PRESETS)
def test_every_field_of_the_fsdp2_policy(name: str) -> None:
    found = fsdp2_policy(policy(name))
    cast = policy(name).casts_parameters
    assert found.param_dtype == (policy(name).compute_dtype if cast else None)
    assert found.reduce_dtype == FP32
    assert found.output_dtype is None
    assert not (cast and found.cast_forward_inputs)  # with FP32 parameters it would cast nothing
