"""The loss of precision by the 16-bit options of a policy, with measured figures."""

from __future__ import annotations

from distmp.precision.policy import SIXTEEN_BIT, PrecisionPolicy
from distmp.utils.dtypes import dtype_name

# Relative errors for bfloat16, measured with `python -m benchmarks.precision`.
MEASURED = {
    "param lost": 0.12,
    "accumulate 8": 0.0035,
    "accumulate 512": 0.035,
    "reduce once": 0.00036,
    "reduce machines": 0.00077,
    "reduce ring": 0.0082,
    "buffer mean": 0.014,
    "output": 0.0048,
}


def costs(policy: PrecisionPolicy) -> list[str]:
    """Return a line for each 16-bit option of a policy, with its cost in precision."""
    figures = {key: f"{value:.2g}" for key, value in MEASURED.items()}
    lines = []
    if policy.param_dtype in SIXTEEN_BIT and not policy.stochastic_rounding:
        lines.append(
            f"param={dtype_name(policy.param_dtype)}: without FP32 master weights an update of "
            f"3e-4 leaves {MEASURED['param lost']:.0%} of the weights unchanged"
        )
    if policy.accumulate_dtype in SIXTEEN_BIT:
        lines.append(
            f"accumulate={dtype_name(policy.accumulate_dtype)}: the sum of 8 microbatches has a "
            f"relative error of {figures['accumulate 8']}, of 512 {figures['accumulate 512']}"
        )
    if policy.reduce_dtype in SIXTEEN_BIT:
        lines.append(
            f"reduce={dtype_name(policy.reduce_dtype)}: the gradient of 64 ranks has a relative "
            f"error of {figures['reduce once']} (on 8 machines {figures['reduce machines']}) where "
            f"distmp sums it in FP32, and of {figures['reduce ring']} where the backend sums it in "
            "16 bits"
        )
    if policy.buffer_dtype in SIXTEEN_BIT:
        lines.append(
            f"buffer={dtype_name(policy.buffer_dtype)}: a running mean has a relative error of "
            f"{figures['buffer mean']} after 1,000 batches"
        )
    if policy.output_dtype in SIXTEEN_BIT:
        lines.append(
            f"output={dtype_name(policy.output_dtype)}: the gradient of a cross entropy has a "
            f"relative error of {figures['output']}"
        )
    return lines
