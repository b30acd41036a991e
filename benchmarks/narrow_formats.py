"""Final losses under FP8, MXFP8 and NVFP4, next to bf16: `python -m benchmarks.narrow_formats`.

Trains the 22 M transformer on the text of the quickstart under each policy and several seeds.
Products are emulated where the device has no kernels for them. On one CPU core a training takes
four to nine minutes. `--size 1m` selects a model on which NVFP4 has a larger gap, and shows what a
late switch of the forward products to bf16 recovers.
"""

from __future__ import annotations

import sys

from benchmarks.continued_runs import REFERENCE, final_losses, parser, save_result
from benchmarks.report import machine
from benchmarks.tables.formats import narrow_formats

NVFP4 = ("--precision.policy", "nvfp4")
ALL_BLOCKS = ("--precision.policy", "nvfp4,hp=head")


def wide_forward(part: float) -> tuple[str, str]:
    """Return the arguments for forward products in bf16 after a part of the run."""
    return "--precision.phases", f"{{after_fraction: {part}, forward: bf16}}"


# Arguments of the run by the name of the candidate, for each size of the model.
CANDIDATES: dict[str, dict[str, tuple[str, ...]]] = {
    "22m": {
        REFERENCE: ("--precision.policy", "bf16"),
        "fp8": ("--precision.policy", "fp8"),
        "fp8-rowwise": ("--precision.policy", "fp8-rowwise"),
        "mxfp8": ("--precision.policy", "mxfp8"),
        "nvfp4": NVFP4,
        "nvfp4, switch at 80%": (*NVFP4, *wide_forward(0.8)),
    },
    "1m": {
        REFERENCE: ("--precision.policy", "bf16"),
        "nvfp4,hp=head": ALL_BLOCKS,
        "nvfp4,hp=head, switch at 80%": (*ALL_BLOCKS, *wide_forward(0.8)),
        "nvfp4,hp=head, switch at 65%": (*ALL_BLOCKS, *wide_forward(0.65)),
    },
}


def main() -> int:
    arguments = parser(__doc__).parse_args()
    candidates = CANDIDATES[arguments.size]
    result = {"machine": machine("cpu"), **final_losses(candidates, arguments)}
    print(narrow_formats(result))
    print(f"saved to {save_result('narrow-formats', result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
