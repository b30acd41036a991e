from __future__ import annotations

import pytest
import torch

from distmp.utils.host_copy import HostCopy
from tests.recording import no_waiting


def test_host_values_are_available_immediately() -> None:
    copy = HostCopy(torch.arange(3))
    assert copy.is_complete
    assert not copy.on_device
    assert copy.read() == [0, 1, 2]


@pytest.mark.gpu
def test_gpu_values_are_read_after_arrival() -> None:
    values = torch.zeros(3, device="cuda")
    for step in range(1, 4):
        with no_waiting():
            values += 1
            copy = HostCopy(values)
            values *= 1  # by the same stream, after the copy
        assert copy.read() == [step] * 3
        assert copy.is_complete
    torch.cuda._sleep(2_000_000_000)
    copy = HostCopy(values)
    assert not copy.is_complete
    torch.cuda.synchronize()
    assert copy.is_complete
