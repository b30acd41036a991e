from __future__ import annotations

import pytest

from distmp.telemetry.profiling.memory import Blocks, Memory, of_trace
from tests.telemetry.profiling.events import ENGINE, event, memory, on_cpu, on_cuda, phase

STEP = [
    phase("step 4", 0, 50),
    phase("forward of microbatch 1", 0, 30),
    event("aten::linear", 5, 10, **{"Input Dims": [[8, 2], [], [3, 2]]}),
    event("aten::addmm", 6, 9),
    phase("update", 30, 50),
]


def found(*events: object, on: object = on_cpu) -> Memory:
    result = of_trace(on(*STEP, *events))  # type: ignore[operator]
    assert result is not None
    return result


def test_the_peak_and_the_blocks_in_use() -> None:
    result = found(
        memory(7, 0xA, 100),
        memory(8, 0xB, 100),
        memory(12, 0xC, 40),
        memory(14, 0xB, -100),
        memory(20, 0xD, 70),
        memory(31, 0xE, 95),
        memory(32, 0xA, -100),
        memory(33, 0xF, 1),
    )
    assert (result.peak_bytes, result.phase, result.step) == (305, "update", "step 4")
    shapes, forward = "[8, 2], [3, 2]", "forward of microbatch 1"
    assert result.largest == [
        Blocks(110, 2, "", "", forward),
        Blocks(100, 1, "aten::linear", shapes, forward),
        Blocks(95, 1, "", "", "update"),
    ]
    assert result.in_use == [100, 200, 240, 140, 210, 305, 205, 206]
    assert result.seconds == pytest.approx([t / 1e6 for t in (7, 8, 12, 14, 20, 31, 32, 33)])


def test_an_address_that_is_allocated_again_was_freed() -> None:
    """torch does not record memory that gloo's threads free."""
    result = found(memory(7, 0xA, 100), memory(8, 0xA, 30), memory(9, 0xB, 20))
    assert result.in_use == [100, 30, 50]
    assert result.peak_bytes == 100
    assert [blocks.nbytes for blocks in result.largest] == [100]


def test_on_cuda_all_memory_in_use_counts() -> None:
    result = found(
        memory(6, 0xC, 10**9, 10**9),  # on the host
        memory(7, 0xA, 100, 5100, device=1),
        memory(8, 0x9, -3000, 2100, device=1),  # older than the trace
        event("aten::mm", 8, 11, thread=ENGINE),
        memory(9, 0xB, 3200, 5300, device=1, thread=ENGINE),
        on=on_cuda,
    )
    assert result.in_use == [5100, 2100, 5300]
    assert result.peak_bytes == 5300
    assert [(blocks.nbytes, blocks.operator) for blocks in result.largest] == [
        (3200, "aten::mm"),
        (100, "aten::linear"),
    ]


def test_no_allocations() -> None:
    assert of_trace(on_cpu(*STEP)) is None
    assert of_trace(on_cpu(memory(7, 0xA, 100), phase("step 4", 10, 50))) is None
