"""Rates of matrix products on GPUs, and an upper limit of the gain from narrow formats.

Rates are TFLOP/s of dense products from the datasheets of the manufacturers, per GPU:

- NVIDIA A100 80GB SXM: "NVIDIA A100 Tensor Core GPU" datasheet (2021).
- NVIDIA H100 SXM and H200 SXM: "NVIDIA H100 Tensor Core GPU" (2023) and "NVIDIA H200 Tensor Core
  GPU" (2024) datasheets, which give twice these numbers, with sparsity.
- NVIDIA B200: "NVIDIA DGX B200" datasheet (2024), an eighth of 8 GPUs: 72 PFLOP/s FP8 with sparsity
  and 72 PFLOP/s dense FP4.
- AMD Instinct MI300X: "AMD Instinct MI300X Accelerator" datasheet (2023), without sparsity.
"""

from __future__ import annotations

from typing import NamedTuple

EIGHT_BITS = ("e4m3", "e5m2")
FOUR_BITS = ("e2m1",)


class Rates(NamedTuple):
    """Dense TFLOP/s of a GPU; None for a format that it only emulates.

    Attributes:
        bf16: With operands of 16 bits.
        fp8: With operands of 8 bits.
        fp4: With operands of 4 bits.
    """

    bf16: float
    fp8: float | None
    fp4: float | None


DATASHEET = {
    "A100": Rates(312, None, None),
    "H100 SXM": Rates(989, 1979, None),
    "H200": Rates(989, 1979, None),
    "B200": Rates(2250, 4500, 9000),
    "MI300X": Rates(1307, 2615, None),
}


class Measurement(NamedTuple):
    """Training throughput under two policies on the same GPUs, measured by others.

    Attributes:
        hardware: The GPUs.
        policy: The policy of distmp that corresponds to it.
        what: What was measured.
        wide: Tokens per second of a GPU in bfloat16.
        narrow: Tokens per second of a GPU with narrow products.
    """

    hardware: str
    policy: str
    what: str
    wide: int
    narrow: int


# torchao's README on float8 and MX training: Llama 3 8B, FSDP2, torch.compile.
MEASURED_BY = "torchao's authors, Llama 3 8B"
MEASURED = (
    Measurement("8 x H100", "fp8", "tensorwise with 8-bit all-gather", 6150, 7690),
    Measurement("8 x H100", "fp8-rowwise", "rowwise", 6150, 6768),
    Measurement("8 x B200", "fp8", "tensorwise", 8308, 10417),
    Measurement("8 x B200", "mxfp8", "MXFP8", 8308, 9969),
)


def largest_gain(rates: Rates, eight_bits: float, four_bits: float) -> float | None:
    """Return how much faster a step can be than in bfloat16, by Amdahl's rule.

    It assumes that a step takes only the time of its matrix products, at the rates of the
    datasheet. A real step is slower.

    Args:
        rates: Those of the GPU.
        eight_bits: Share of the operations with operands of 8 bits.
        four_bits: Share of the operations with operands of 4 bits.

    Returns:
        The ratio of times; None if the GPU has no rate for a format.
    """
    if (eight_bits and rates.fp8 is None) or (four_bits and rates.fp4 is None):
        return None
    time = 1 - eight_bits - four_bits
    time += eight_bits * rates.bf16 / rates.fp8 if rates.fp8 else 0
    time += four_bits * rates.bf16 / rates.fp4 if rates.fp4 else 0
    return 1 / time
