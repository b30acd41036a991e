"""An out-of-memory error names the settings of the run that need less memory."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from distmp.config import BatchConfig, RunConfig
from distmp.training.failures import advice
from distmp.utils.processes import is_out_of_memory

CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.15 GiB of "
    "which 1.25 GiB is free."
)


def text(config: RunConfig | None, world_size: int = 4) -> str:
    message = advice(torch.OutOfMemoryError(CUDA), config, world_size, "step 3, decision")
    assert message is not None
    return message


def test_host_out_of_memory_errors_are_recognized() -> None:
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(1 << 50, dtype=torch.uint8)
    with pytest.raises(MemoryError) as numpys:
        np.empty(1 << 50, dtype=np.uint8)
    for error in (torchs.value, numpys.value):
        message = advice(error, None, 1, "setup")
        assert message is not None
        assert f"ran out of main memory in setup: {str(error).split()[0]}" in message
        assert re.search(r"in use: [\d.]+ [MG]iB by this rank; [\d.]+ [MGT]iB of", message)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError(CUDA), True),
        (MemoryError(), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("an illegal memory access was encountered"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_out_of_memory_errors_are_recognized(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
    assert (advice(error, None, 1, "setup") is not None) is expected


def test_advice_names_current_values() -> None:
    message = text(RunConfig(batch=BatchConfig(global_batch_size=96, microbatch_size=6)))
    assert (
        "batch.microbatch_size = 3 instead of 6: the same global batch of 96 in 2 times" in message
    )
    assert "activation_checkpointing = blocks instead of none" in message
    assert "strategy = fsdp instead of auto" in message
    assert "`distmp explain`" in message


def test_advice_does_not_attribute_ddp_to_auto() -> None:
    automatic, replicated = text(RunConfig()), text(RunConfig(strategy="ddp"))
    assert "strategy = fsdp instead of auto, if auto selected ddp: shards" in automatic
    assert "strategy = fsdp instead of ddp: shards" in replicated


def test_advice_omits_settings_already_active() -> None:
    sharded = RunConfig(
        strategy="fsdp",
        activation_checkpointing="blocks",
        batch=BatchConfig(global_batch_size=4, microbatch_size=1),
    )
    message = text(sharded)
    for word in ("microbatch_size", "activation_checkpointing", "strategy"):
        assert word not in message
    assert "more ranks than 4" in message
    alone = text(RunConfig(), world_size=1)
    assert "fsdp" not in alone


@pytest.mark.parametrize("size", [2, 3, 4, 6, 9, 15, 16])
def test_suggested_microbatch_size_is_valid(size: int) -> None:
    config = RunConfig(batch=BatchConfig(global_batch_size=4 * size, microbatch_size=size))
    found = re.search(r"microbatch_size = (\d+) instead", text(config))
    assert found is not None
    smaller = int(found[1])
    assert 1 <= smaller <= size // 2
    RunConfig(batch=BatchConfig(global_batch_size=4 * size, microbatch_size=smaller))
