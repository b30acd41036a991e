"""The precision policy: the dtypes of all tensors of a training run, and the loss scale."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from distmp.errors import require
from distmp.utils import LARGEST_LOSS_SCALE, SMALLEST_LOSS_SCALE
from distmp.utils.dtypes import dtype_name

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *SIXTEEN_BIT)

# Names of dtypes in configurations.
DTYPE_WORDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Formats of the operands of a matrix product with fewer than 16 bits: 4 or 5 exponent bits and 3 or
# 2 mantissa bits (FP8), and 2 and 1 (FP4).
LOW_PRECISION_FORMATS = ("e4m3", "e5m2", "e2m1")
# Which values of an operand share a scale: all, those of a row, or blocks of 32 or 16 values.
SCALINGS = ("tensor", "row", "block32", "block16")

# The separators in the text of a policy cannot be part of a pattern or a name.
_PATTERN = re.compile(r"[^\s,|=]+")
_NAME = re.compile(r"[^\s](.*[^\s])?")


@dataclass(frozen=True)
class PrecisionPolicy:
    """The floating-point dtypes of a training run. A policy that cannot be implemented is refused.

    Attributes:
        name: Name of the policy in messages.
        param_dtype: Dtype of the weights that the optimizer updates. It is FP32, or the 16-bit
            `compute_dtype` for policies without master weights ("pure").
        compute_dtype: Dtype of matrix products and activations.
        autocast: If False, the module holds its parameters in `compute_dtype`, and the optimizer
            holds an FP32 master copy of each if `param_dtype` is FP32. If True, the module holds
            FP32 parameters, and `torch.autocast` casts per operation (norms, softmax and losses
            stay in FP32).
        reduce_dtype: Communication dtype of gradients. Where distmp reduces, the sum is computed in
            FP32.
        accumulate_dtype: Dtype of the sum of gradients over microbatches.
        buffer_dtype: Dtype of floating-point buffers (running statistics, tables) outside of
            modules that are kept in FP32. None keeps their dtypes, and runs normalization layers
            with FP32 running statistics in FP32.
        output_dtype: Dtype of floating-point outputs of the root module.
        loss_scale: "dynamic" adjusts the scale after overflows, a number is a fixed scale, None
            disables scaling. A step with non-finite gradients is skipped on every rank in all three
            cases.
        keep_fp32: Modules that are stored and computed in FP32 under a 16-bit policy; see
            `distmp.precision.keep.kept_modules` for the patterns. A name with parentheses, such as
            `prod()`, is a function, see `distmp.precision.functions`.
        stochastic_rounding: Whether the optimizer rounds 16-bit weights stochastically, so that
            small updates are kept on average. It needs `distmp.optim.AdamW`.
        cast_inputs: Whether the root module casts floating-point inputs to the dtype of its
            parameters.
        tf32: Whether FP32 matrix products may round their inputs to TF32 (10 bits of mantissa)
            where the hardware supports it.
        forward_format: Format of input and weight in the forward product of linear layers: "e4m3",
            "e5m2" (8 bits), "e2m1" (4 bits), or None for the compute dtype. Products are summed
            in FP32 in any case. See `distmp.quantization`.
        grad_format: Format of the output gradient in the product for the gradient of the input.
        wgrad_format: Format of the output gradient in the product for the gradient of the weight.
        scaling: Which values of a low-precision operand share a scale: "tensor" (all), "row" (a row
            along the summed dimension), "block32" (32 values, MXFP8) or "block16" (16 values,
            NVFP4).
        hp: Linear layers whose products stay in the compute dtype (high precision): patterns as in
            `keep_fp32`, `embedding` for a head that shares the weight of an embedding, and
            `first2`, `last2` or `last15%` for the layers in the first or last blocks.

    Raises:
        ConfigError: For a value or a combination that cannot run, is contradictory, or would
            silently ignore a field.

    Example:
        >>> import torch
        >>> PrecisionPolicy("mine", compute_dtype=torch.bfloat16, autocast=True).reduce_dtype
        torch.float32
    """

    name: str
    param_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    autocast: bool = False
    reduce_dtype: torch.dtype = torch.float32
    accumulate_dtype: torch.dtype = torch.float32
    buffer_dtype: torch.dtype | None = None
    output_dtype: torch.dtype = torch.float32
    loss_scale: Literal["dynamic"] | float | None = None
    stochastic_rounding: bool = False
    keep_fp32: tuple[str, ...] = ()
    cast_inputs: bool = True
    tf32: bool = False
    forward_format: str | None = None
    grad_format: str | None = None
    wgrad_format: str | None = None
    scaling: str = "tensor"
    hp: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_values()
        self._check_formats()
        self._check_weights()
        self._check_gradients()
        self._check_loss_scale()
        self._check_module()

    @property
    def casts_parameters(self) -> bool:
        """Whether the module holds its parameters in 16 bits."""
        return self.compute_dtype in SIXTEEN_BIT and not self.autocast

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates FP32 master weights of 16-bit parameters."""
        return self.casts_parameters and self.param_dtype == torch.float32

    @property
    def kept_functions(self) -> tuple[str, ...]:
        """Names of the functions that `keep_fp32` computes in FP32."""
        return tuple(entry[:-2] for entry in self.keep_fp32 if entry.endswith("()"))

    @property
    def kept_module_patterns(self) -> tuple[str, ...]:
        """Patterns of the modules that `keep_fp32` keeps in FP32."""
        return tuple(entry for entry in self.keep_fp32 if not entry.endswith("()"))

    @property
    def has_low_precision_matmuls(self) -> bool:
        """Whether any matrix product of linear layers has operands of fewer than 16 bits."""
        return any((self.forward_format, self.grad_format, self.wgrad_format))

    @property
    def high_precision(self) -> PrecisionPolicy:
        """This policy with all matrix products in the compute dtype."""
        if not self.has_low_precision_matmuls:
            return self
        formats = {"forward_format": None, "grad_format": None, "wgrad_format": None}
        return replace(self, **formats, scaling="tensor", hp=())  # type: ignore[arg-type]

    @property
    def module_dtype(self) -> torch.dtype:
        """Dtype in which the module holds its parameters, except those kept in FP32."""
        return self.compute_dtype if self.casts_parameters else self.param_dtype

    def _check_values(self) -> None:
        valid = isinstance(self.name, str) and _NAME.fullmatch(self.name) is not None
        self._require(valid, "name", "use a word or two on one line")
        problem = f"choose one of {', '.join(map(dtype_name, DTYPES))}"
        for key in ("param", "compute", "reduce", "accumulate", "output", "buffer"):
            allowed = (*DTYPES, None) if key == "buffer" else DTYPES
            self._require(getattr(self, f"{key}_dtype") in allowed, key, problem)
        for key in ("autocast", "cast_inputs", "tf32", "stochastic_rounding"):
            self._require(isinstance(getattr(self, key), bool), key, "use True or False")
        for key in ("keep_fp32", "hp"):
            self._check_patterns(key, getattr(self, key))

    def _check_patterns(self, key: str, patterns: Any) -> None:
        self._require(isinstance(patterns, tuple), key, "use a tuple of patterns")
        for pattern in patterns:
            valid = isinstance(pattern, str) and _PATTERN.fullmatch(pattern) is not None
            self._require(valid, key, "use a pattern without spaces, ',', '|' and '='", pattern)
        self._require(len(set(patterns)) == len(patterns), key, "names a pattern twice")

    def _check_formats(self) -> None:
        for key in ("forward", "grad", "wgrad"):
            self._check_format(key, getattr(self, f"{key}_format"))
        choices = f"choose one of {', '.join(SCALINGS)}"
        self._require(self.scaling in SCALINGS, "scaling", choices)
        if not self.has_low_precision_matmuls:
            problem = "no product has a low-precision format"
            self._require(self.scaling == "tensor", "scaling", f"{problem}; set forward")
            self._require(not self.hp, "hp", f"{problem}; remove it")
            return
        problem = "results of low-precision matmuls need bfloat16's range; use compute=bf16"
        self._require(self.compute_dtype == torch.bfloat16, "compute", problem)

    def _check_format(self, key: str, value: Any) -> None:
        if value == dtype_word(self.compute_dtype):
            # Another spelling of the default.
            object.__setattr__(self, f"{key}_format", None)
            return
        if value is None:
            return
        choices = f"choose one of {', '.join(LOW_PRECISION_FORMATS)}, bf16"
        self._require(value in LOW_PRECISION_FORMATS, key, choices)
        problem = "scaling=block16 is for e2m1; use scaling=tensor, row or block32"
        if value == "e2m1":
            problem = "4 bits need the scales of NVFP4; use scaling=block16"
        self._require((value == "e2m1") == (self.scaling == "block16"), key, problem)

    def _check_weights(self) -> None:
        valid = not self.autocast or self.compute_dtype != torch.float32
        self._require(valid, "autocast", "FP32 compute needs no autocast; set it to False")
        problem = (
            "rounds 16-bit weights, and this policy has FP32 weights; remove it, or use bf16-pure"
        )
        in_fp32 = self.param_dtype == torch.float32
        self._require(not (self.stochastic_rounding and in_fp32), "stochastic_rounding", problem)
        if in_fp32:
            return
        problem = (
            "float16 weights lose small updates, and Adam's epsilon of 1e-8 becomes zero; use "
            "FP32 weights with param=fp32"
        )
        self._require(self.param_dtype != torch.float16, "param", problem)
        problem = "autocast casts from FP32 weights; use param=fp32"
        self._require(not self.autocast, "param", problem)
        problem = f"is not the compute dtype {dtype_name(self.compute_dtype)}; use param=fp32"
        self._require(self.param_dtype == self.compute_dtype, "param", problem)

    def _check_gradients(self) -> None:
        problem = (
            f"cannot represent {dtype_name(self.compute_dtype)} gradients and saves nothing; use "
            f"reduce={dtype_word(self.compute_dtype)} or reduce=fp32"
        )
        differ = {self.reduce_dtype, self.compute_dtype} == {*SIXTEEN_BIT}
        self._require(not differ, "reduce", problem)
        if self.accumulate_dtype == torch.float32:
            return
        problem = (
            "FP32 weights need sums in float32; 16 bits are for policies with 16-bit weights "
            "(bf16-pure)"
        )
        self._require(self.param_dtype != torch.float32, "accumulate", problem)
        problem = (
            f"differs from the {dtype_name(self.param_dtype)} weights; use fp32 or "
            f"{dtype_word(self.param_dtype)}"
        )
        self._require(self.accumulate_dtype == self.param_dtype, "accumulate", problem)

    def _check_loss_scale(self) -> None:
        scale = self.loss_scale
        if isinstance(scale, int | float) and not isinstance(scale, bool):
            in_range = SMALLEST_LOSS_SCALE <= scale <= LARGEST_LOSS_SCALE
            self._require(in_range, "loss_scale", "use a number from 2^-126 to 2^126")
        else:
            known = scale in (None, "dynamic")
            self._require(known, "loss_scale", 'use "dynamic", a number, or None')
        has_fp16 = torch.float16 in (self.compute_dtype, self.reduce_dtype)
        problem = "float16 gradients below 6e-8 become zero without a loss scale; use 'dynamic'"
        self._require(scale is not None or not has_fp16, "loss_scale", problem)

    def _check_module(self) -> None:
        problem = (
            f"is not the compute dtype {dtype_name(self.compute_dtype)}; use "
            f"fp32 or {dtype_word(self.compute_dtype)}"
        )
        valid = self.output_dtype in (torch.float32, self.compute_dtype)
        self._require(valid, "output", problem)
        problem = (
            f"parameters are held in {dtype_name(self.module_dtype)}, and layers need both in "
            "one dtype; use fp32 or remove it"
        )
        valid = self.buffer_dtype in (None, torch.float32, self.module_dtype)
        self._require(valid, "buffer", problem)
        problem = "everything is computed in FP32 already; remove it"
        if self.tf32:
            problem = "TF32 is set for the process, so no module can be excluded"
        in_fp32 = self.compute_dtype == torch.float32
        self._require(not (self.keep_fp32 and in_fp32), "keep_fp32", problem)
        problem = (
            "torch's autocast selects the functions in FP32; remove them or use autocast=false"
        )
        self._require(not (self.kept_functions and self.autocast), "keep_fp32", problem)
        problem = "applies only to FP32; use compute=fp32 or set it to False"
        self._require(in_fp32 or not self.tf32, "tf32", problem)

    def _require(self, valid: bool, key: str, problem: str, *values: object) -> None:
        """Refuse the value of a field, or one of its values, unless it is valid."""
        value = values[0] if values else getattr(self, FIELDS[key])
        if isinstance(value, torch.dtype) and value in DTYPES:
            value = dtype_word(value)  # as the user has written it
        require(valid, f"precision.policy.{key}", value, problem)


# Name of each field by its key in text and in mappings.
FIELDS = {
    field.name.removesuffix("_dtype").removesuffix("_format"): field.name
    for field in fields(PrecisionPolicy)
}


def dtype_word(dtype: torch.dtype) -> str:
    """Return "bf16" for `torch.bfloat16`, as configurations spell it, or the name of another."""
    return next((word for word, known in DTYPE_WORDS.items() if known == dtype), dtype_name(dtype))


def _low_precision(
    name: str, forward: str, gradients: str, scaling: str, *hp: str
) -> PrecisionPolicy:
    """Return a policy whose matmuls have 8 or 4 bits, except those of heads and embeddings."""
    return PrecisionPolicy(
        name,
        compute_dtype=torch.bfloat16,
        forward_format=forward,
        grad_format=gradients,
        wgrad_format=gradients,
        scaling=scaling,
        hp=("head", "embedding", *hp),
    )


PRESETS: dict[str, PrecisionPolicy] = {
    preset.name: preset
    for preset in (
        PrecisionPolicy("fp32"),
        PrecisionPolicy("tf32", tf32=True),
        PrecisionPolicy("bf16", compute_dtype=torch.bfloat16),
        PrecisionPolicy("bf16-autocast", compute_dtype=torch.bfloat16, autocast=True),
        PrecisionPolicy("bf16-pure", param_dtype=torch.bfloat16, compute_dtype=torch.bfloat16),
        PrecisionPolicy("fp16", compute_dtype=torch.float16, loss_scale="dynamic"),
        PrecisionPolicy(
            "fp16-autocast", compute_dtype=torch.float16, autocast=True, loss_scale="dynamic"
        ),
        PrecisionPolicy("fp16-static", compute_dtype=torch.float16, loss_scale=1024.0),
        _low_precision("fp8", "e4m3", "e5m2", "tensor"),
        _low_precision("fp8-rowwise", "e4m3", "e4m3", "row"),
        _low_precision("mxfp8", "e4m3", "e4m3", "block32"),
        _low_precision("nvfp4", "e2m1", "e2m1", "block16", "last15%"),
    )
}


# Cost of 16 bits by the key of a dtype, with relative errors for bfloat16, measured with
# `python -m benchmarks.precision`.
COSTS = {
    "param": "without FP32 master weights an update of 3e-4 leaves 12% of the weights unchanged",
    "accumulate": "the sum of 8 microbatches has a relative error of 0.0035, of 512 0.035",
    "reduce": "the gradient of 64 ranks has a relative error of 0.00036 (on 8 machines 0.00077) "
    "where distmp sums it in FP32, and of 0.0082 where the backend sums it in 16 bits",
    "buffer": "a running mean has a relative error of 0.014 after 1,000 batches; tables of rotary "
    "positions are rounded, too",
    "output": "the gradient of a cross entropy has a relative error of 0.0048",
}


def costs(policy: PrecisionPolicy) -> list[str]:
    """Return a line for each 16-bit option of a policy, with its cost in precision."""
    dtypes = {key: getattr(policy, FIELDS[key]) for key in COSTS}
    if policy.stochastic_rounding:  # 16-bit weights then keep small updates, on average
        del dtypes["param"]
    return [
        f"{key}={dtype_name(dtype)}: {COSTS[key]}"
        for key, dtype in dtypes.items()
        if dtype in SIXTEEN_BIT
    ]
