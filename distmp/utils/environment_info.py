"""Versions and environment variables, which the ranks of a run should have in common."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata

from distmp.masking import is_secret, masked_text

# Prefixes of environment variables that change the behavior of a run.
_RELEVANT = (
    "ACCELERATE_",
    "CUDA_",
    "GLOO_",
    "GOMP_",
    "KMP_",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
    "MKL_NUM_THREADS",
    "NCCL_",
    "OMP_",
    "PET_",
    "PYTORCH_",
    "RANK",
    "TORCH",
    "WORLD_SIZE",
)


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change the behavior of a run, without those that may be secret."""
    return {
        name: masked_text(value)
        for name, value in sorted(environment.items())
        if name.startswith(_RELEVANT) and not is_secret(name)
    }


def versions() -> dict[str, str | None]:
    """Return versions of Python, distmp, torch, NCCL and accelerate; None if not installed."""
    import torch

    import distmp

    has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    return {
        "python": platform.python_version(),
        "distmp": distmp.__version__,
        "torch": str(torch.__version__),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        "accelerate": next((d.version for d in metadata.distributions(name="accelerate")), None),
    }
