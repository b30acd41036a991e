from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from distmp.telemetry.measurements import peak_memory_bytes

_STATUS = Path("/proc/self/status")


@pytest.mark.skipif(not _STATUS.exists(), reason="needs Linux's /proc")
def test_cpu_agrees_with_the_kernel() -> None:
    before = peak_memory_bytes(torch.device("cpu"))
    block = bytearray(b"x" * before)
    del block
    after = peak_memory_bytes(torch.device("cpu"))
    (kernel,) = re.findall(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    assert after == pytest.approx(int(kernel) * 1024, rel=0.02)
    assert after > before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_counts_tensors() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats(device)
    before = peak_memory_bytes(device)
    block = torch.empty(2**26, dtype=torch.uint8, device=device)
    del block
    assert 0 <= peak_memory_bytes(device) - before - 2**26 < 2**21
