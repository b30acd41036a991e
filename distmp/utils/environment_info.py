"""The circumstances that ranks of a run should have in common: versions and variables."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata

# Environment variables that change how a run behaves begin so.
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
# Whatever a name begins with, such a value is never shown or written.
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "KEY")


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change how a run behaves, none that may hold a secret."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(_RELEVANT) and not any(word in name.upper() for word in _SECRET)
    }


def versions() -> dict[str, str | None]:
    """Return the versions of what computes and talks; None for what is not installed."""
    import torch

    import distmp

    return {
        "python": platform.python_version(),
        "distmp": distmp.__version__,
        "torch": str(torch.__version__),
        "nccl": _nccl(),
        "accelerate": _installed("accelerate"),
    }


def _nccl() -> str | None:
    import torch

    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
