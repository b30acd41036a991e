"""What a policy gives up beyond the type that it computes in, with the measured figure."""

from __future__ import annotations

from distmp.precision.policy import SIXTEEN_BIT, PrecisionPolicy
from distmp.utils.dtypes import dtype_name

# Relative errors as `python -m benchmarks.precision` measures them, for bfloat16.
MEASURED = {
    "param lost": 0.12,
    "accumulate 8": 0.0035,
    "accumulate 512": 0.035,
    "reduce once": 0.00036,
    "reduce ring": 0.0082,
    "buffer mean": 0.014,
    "output": 0.0048,
}


def costs(policy: PrecisionPolicy) -> list[str]:
    """Say what each saving of a policy costs in precision; nothing for one that saves none."""
    figures = {key: f"{value:.2g}" for key, value in MEASURED.items()}
    found = []
    if policy.param_dtype in SIXTEEN_BIT:
        found.append(
            f"param={dtype_name(policy.param_dtype)}: without FP32 master weights an update of "
            f"3e-4 leaves {MEASURED['param lost']:.0%} of the weights where they are"
        )
    if policy.accumulate_dtype in SIXTEEN_BIT:
        found.append(
            f"accumulate={dtype_name(policy.accumulate_dtype)}: the sum of 8 microbatches is off "
            f"by {figures['accumulate 8']}, that of 512 by {figures['accumulate 512']}"
        )
    if policy.reduce_dtype in SIXTEEN_BIT:
        found.append(
            f"reduce={dtype_name(policy.reduce_dtype)}: the gradient of 64 ranks is off by "
            f"{figures['reduce once']} where distmp sums it in FP32, by {figures['reduce ring']} "
            "where the backend sums it in 16 bits"
        )
    if policy.buffer_dtype in SIXTEEN_BIT:
        found.append(
            f"buffer={dtype_name(policy.buffer_dtype)}: a running mean is off by "
            f"{figures['buffer mean']} after 1,000 batches"
        )
    if policy.output_dtype in SIXTEEN_BIT:
        found.append(
            f"output={dtype_name(policy.output_dtype)}: the gradient of a cross entropy is off by "
            f"{figures['output']}"
        )
    return found
