"""Settings of a process that make results bitwise equal for any number of ranks."""

from __future__ import annotations

import logging
import os

import torch

from distmp.errors import ConfigError

logger = logging.getLogger("distmp")


# cuBLAS reads this variable when its handle is created. With these values it is deterministic.
CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_WORKSPACES = (":4096:8", ":16:8")


def prepare_cublas(device: torch.device | str | None = None) -> None:
    """Let cuBLAS use a fixed workspace, if this process has not used CUDA yet.

    Call it before anything uses the GPU. A value that the user has set is kept.

    Args:
        device: The device that the engine will use; None uses a GPU if there is one.
    """
    may_use_cuda = torch.cuda.is_available() and not str(device).startswith("cpu")
    if may_use_cuda and not torch.cuda.is_initialized():
        os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_WORKSPACES[0])


def make_deterministic(device: torch.device) -> None:
    """Make torch use deterministic algorithms for the rest of the process.

    On a CPU the bits of a sum depend on the number of threads, which usually differs between
    numbers of ranks, so it is set to one. On CUDA cuBLAS needs a fixed workspace, see
    `prepare_cublas`; without one, torch raises an error at the first product.
    """
    if device.type == "cpu" and torch.get_num_threads() > 1:
        logger.info("reproducible: using one CPU thread instead of %d", torch.get_num_threads())
        torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # Deterministic mode also fills uninitialized memory, which is not needed here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def check_power_of_two(microbatches: int) -> None:
    """Refuse a number of microbatches that is not a power of two.

    Raises:
        ConfigError: Naming the nearest powers of two.
    """
    if microbatches.bit_count() != 1:
        lower = 1 << (microbatches.bit_length() - 1)
        problem = (
            f"sums the microbatches of a rank in a binary tree, so their number must be a power of "
            f"two, not {microbatches}; choose batch.global_batch_size and batch.microbatch_size "
            f"so that a rank has {lower} or {2 * lower}"
        )
        raise ConfigError("reproducible", True, problem)
