"""Final losses under FP8, MXFP8 and NVFP4, next to bf16: `python -m benchmarks.narrow_formats`.

Trains the 22 M transformer on the text of the quickstart under each policy and several seeds.
Products are emulated where the device has no kernels for them. On one CPU core a training takes
four to nine minutes. `--size 1m` selects a model on which NVFP4 has a larger gap, and shows what a
late switch of the forward products to bf16 recovers.
"""

from __future__ import annotations

import sys

from benchmarks.continued_runs import REFERENCE, TRAININGS, final_losses, parser, save_result
from benchmarks.report import machine
from benchmarks.tables.formats import narrow_formats


def with_switch(size: str, policy: str, part: float) -> tuple[str, ...]:
    """Return the arguments for forward products in bf16 after a part of the run."""
    training = TRAININGS[size]
    tokens = round(part * training.steps) * training.samples * training.length
    phase = f"{{until_tokens: {tokens}, policy: '{policy}'}}"
    return "--precision.policy", f"{policy},forward=bf16", "--precision.phases", phase


def always_bf16(policy: str) -> tuple[str, ...]:
    """Return the arguments for a reference that counts tokens for the runs that continue it."""
    return "--precision.policy", policy, "--precision.phases", "{until_tokens: .inf, policy: bf16}"


# Arguments of the run by the name of the candidate, for each size of the model.
CANDIDATES: dict[str, dict[str, tuple[str, ...]]] = {
    "22m": {
        REFERENCE: always_bf16("nvfp4"),
        "fp8": ("--precision.policy", "fp8"),
        "fp8-rowwise": ("--precision.policy", "fp8-rowwise"),
        "mxfp8": ("--precision.policy", "mxfp8"),
        "nvfp4": ("--precision.policy", "nvfp4"),
        "nvfp4, switch at 80%": with_switch("22m", "nvfp4", 0.8),
    },
    "1m": {
        REFERENCE: always_bf16("nvfp4,hp=head"),
        "nvfp4,hp=head": ("--precision.policy", "nvfp4,hp=head"),
        "nvfp4,hp=head, switch at 80%": with_switch("1m", "nvfp4,hp=head", 0.8),
        "nvfp4,hp=head, switch at 65%": with_switch("1m", "nvfp4,hp=head", 0.65),
    },
}


def main() -> int:
    arguments = parser(__doc__).parse_args()
    arguments.directory /= "narrow-formats"  # separate from the reference runs of other benchmarks
    candidates = CANDIDATES[arguments.size]
    result = {"machine": machine("cpu"), **final_losses(candidates, arguments)}
    print(narrow_formats(result))
    print(f"saved to {save_result('narrow-formats', result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
