"""What has to be so in a process before its sums can have the same bits at any number of ranks."""

from __future__ import annotations

import logging
import os

import torch

from distmp.errors import ConfigError

logger = logging.getLogger("distmp")


def make_deterministic(device: torch.device) -> None:
    """Have torch use one way of computing, for the rest of the process.

    On a CPU how a sum is divided over threads shows in its bits, and the number of threads usually
    goes down when the number of ranks goes up: one thread. On CUDA cuBLAS needs a fixed workspace.
    """
    torch.use_deterministic_algorithms(True)
    # What deterministic mode does besides: fill memory that nobody has written to yet.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    elif torch.get_num_threads() > 1:
        logger.info("reproducible: one CPU thread instead of %d", torch.get_num_threads())
        torch.set_num_threads(1)


def check_power_of_two(microbatches: int) -> None:
    """Refuse a number of microbatches that does not make a whole binary tree.

    Raises:
        ConfigError: Naming the numbers that would.
    """
    if microbatches < 1 or microbatches & (microbatches - 1):
        lower = 1 << (microbatches.bit_length() - 1)
        raise ConfigError(
            "reproducible",
            True,
            f"sums the microbatches of a rank along a binary tree, which {microbatches} do not "
            f"make; choose batch.global_batch_size and batch.microbatch_size so that a rank has "
            f"{lower} or {2 * lower}",
        )
