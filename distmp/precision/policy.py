"""What is stored, computed and scaled in which floating-point type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from distmp.errors import ConfigError, nearest

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
COMPUTE_DTYPES = (torch.float32, *SIXTEEN_BIT)


@dataclass(frozen=True)
class PrecisionPolicy:
    """The floating-point types of one training run.

    The optimizer always steps FP32 weights, and gradients are always accumulated over microbatches
    and reduced over ranks in FP32; a policy decides what happens in between.

    Attributes:
        name: How the policy is called in a configuration.
        compute_dtype: The type of matrix products and activations.
        autocast: How `compute_dtype` comes about. False: the module holds its parameters in
            `compute_dtype`, the optimizer holds an FP32 master copy of each, floating-point inputs
            are cast. True: the module holds FP32 parameters, and `torch.autocast` casts per
            operation (norms, softmax and losses stay in FP32).
        output_dtype: The type in which the outermost module returns floating-point outputs.
        reduce_dtype: What gradients travel in between ranks; they are summed in FP32 all the same.
        loss_scale: "dynamic" scales the loss and follows overflows, None leaves the loss alone. A
            step with a non-finite gradient is skipped on every rank in both cases.

    Raises:
        ConfigError: For a combination that cannot run or would lose a field silently.
    """

    name: str
    compute_dtype: torch.dtype = torch.float32
    autocast: bool = False
    output_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    loss_scale: Literal["dynamic"] | None = None

    def __post_init__(self) -> None:
        for field in ("compute_dtype", "output_dtype"):
            value = getattr(self, field)
            if value not in COMPUTE_DTYPES:
                known = ", ".join(dtype_name(dtype) for dtype in COMPUTE_DTYPES)
                raise ConfigError(f"precision.{field}", value, f"choose one of {known}")
        if self.autocast and self.compute_dtype == torch.float32:
            raise ConfigError(
                "precision.autocast", True, "FP32 compute needs no autocast; set it to False"
            )
        if self.loss_scale not in ("dynamic", None):
            raise ConfigError("precision.loss_scale", self.loss_scale, 'use "dynamic" or None')
        if self.compute_dtype == torch.float16 and self.loss_scale is None:
            raise ConfigError(
                "precision.loss_scale",
                None,
                "float16 gradients below 6e-8 become zero without a loss scale; use 'dynamic'",
            )

    @property
    def casts_parameters(self) -> bool:
        """Whether the module holds 16-bit parameters beside FP32 master weights."""
        return self.compute_dtype in SIXTEEN_BIT and not self.autocast


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


PRESETS: dict[str, PrecisionPolicy] = {
    preset.name: preset
    for preset in (
        PrecisionPolicy("fp32"),
        PrecisionPolicy("bf16", compute_dtype=torch.bfloat16),
        PrecisionPolicy("bf16-autocast", compute_dtype=torch.bfloat16, autocast=True),
        PrecisionPolicy("fp16", compute_dtype=torch.float16, loss_scale="dynamic"),
        PrecisionPolicy(
            "fp16-autocast", compute_dtype=torch.float16, autocast=True, loss_scale="dynamic"
        ),
    )
}


def policy(name: str) -> PrecisionPolicy:
    """Return the preset called `name`.

    Raises:
        ConfigError: If there is none; "auto" needs a device, see `distmp.precision.resolve`.
    """
    if name not in PRESETS:
        raise ConfigError("precision.policy", name, nearest(name, [*PRESETS, "auto"]))
    return PRESETS[name]
