"""Final losses under FP8, MXFP8 and NVFP4, next to bf16: `python -m benchmarks.narrow_formats`.

Trains the 22 M transformer on the text of the quickstart under each policy and several seeds.
Products are emulated where the device has no kernels for them. On one CPU core a training takes
five to seven minutes.
"""

from __future__ import annotations

import sys

from benchmarks.continued_runs import REFERENCE, final_losses, parser
from benchmarks.report import machine, save
from benchmarks.tables.formats import narrow_formats

# The share of the run after which the forward products of the last candidate are wide.
SWITCH = 0.8
# Arguments of the run by the name of the candidate.
CANDIDATES: dict[str, tuple[str, ...]] = {
    REFERENCE: ("--precision.policy", "bf16"),
    "fp8": ("--precision.policy", "fp8"),
    "fp8-rowwise": ("--precision.policy", "fp8-rowwise"),
    "mxfp8": ("--precision.policy", "mxfp8"),
    "nvfp4": ("--precision.policy", "nvfp4"),
    "nvfp4, late switch": (
        *("--precision.policy", "nvfp4"),
        *("--precision.phases", f"{{after_fraction: {SWITCH}, forward: bf16}}"),
    ),
}


def main() -> int:
    arguments = parser(__doc__, list(CANDIDATES)).parse_args()
    result = {"machine": machine("cpu"), **final_losses(CANDIDATES, arguments)}
    print(narrow_formats(result))
    print(f"saved to {save('narrow-formats-cpu', result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
