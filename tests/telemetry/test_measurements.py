"""Memory, throughput, low-precision operands, and communication in hand-written traces."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distmp.engine.low_precision_matmuls import MatmulStatistics
from distmp.quantization.linear import OPERANDS
from distmp.telemetry.measurements import StepTimer, peak_memory_bytes, summarize
from distmp.telemetry.profiler import RankTimes, measured, summary

_STATUS = Path("/proc/self/status")


@pytest.mark.skipif(not _STATUS.exists(), reason="needs Linux's /proc")
def test_cpu_memory_agrees_with_kernel() -> None:
    before = peak_memory_bytes(torch.device("cpu"))
    block = bytearray(b"x" * before)
    del block
    after = peak_memory_bytes(torch.device("cpu"))
    (kernel,) = re.findall(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    assert after == pytest.approx(int(kernel) * 1024, rel=0.02)
    assert after > before


@pytest.mark.gpu
def test_cuda_memory_counts_tensors() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats(device)
    before = peak_memory_bytes(device)
    block = torch.empty(2**26, dtype=torch.uint8, device=device)
    del block
    assert 0 <= peak_memory_bytes(device) - before - 2**26 < 2**21


def _timer(*readings: float) -> StepTimer:
    iterator: Iterator[float] = iter(readings)
    return StepTimer(clock=lambda: next(iterator))


def test_laps_are_contiguous() -> None:
    timer = _timer(10.0, 12.0, 12.5)
    assert timer.lap() == 2.0
    assert timer.lap() == 0.5


def test_pauses_are_excluded() -> None:
    timer = _timer(0.0, 1.0, 61.0, 70.0, 75.0, 80.0)
    with timer.paused():
        pass
    with timer.paused():
        pass
    assert timer.paused_seconds == 65.0
    assert timer.lap() == 15.0
    assert timer.paused_seconds == 0.0


def test_nested_pauses_are_excluded_once() -> None:
    timer = _timer(0.0, 1.0, 2.0, 5.0, 9.0, 10.0)
    with timer.paused(), timer.paused():
        pass
    assert timer.lap() == 2.0


def test_failed_pause_is_excluded() -> None:
    timer = _timer(0.0, 1.0, 5.0, 6.0)
    with pytest.raises(KeyError), timer.paused():
        raise KeyError
    assert timer.lap() == 2.0


def test_constant_clock_gives_positive_lap() -> None:
    assert _timer(1.0, 1.0).lap() > 0


def statistics(sums: dict[str, list[list[float]]], largest: float = 2.0) -> MatmulStatistics:
    """Return statistics of two layers; operands without numbers have high precision."""
    values = torch.zeros(2, len(OPERANDS), 3, dtype=torch.float64)
    for operand, numbers in sums.items():
        values[:, OPERANDS.index(operand)] = torch.tensor(numbers, dtype=torch.float64)
    magnitudes = torch.full(values.shape[:2], 1.0, dtype=torch.float64)
    magnitudes[1] = largest
    return MatmulStatistics(["first", "second"], values, magnitudes)


def test_shares_are_relative_to_all_values() -> None:
    found = summarize(statistics({"input": [[1, 0, 10], [0, 6, 30]], "grad": [[0, 0, 4]] * 2}))
    assert found == {
        "input": {
            "saturated": 1 / 40,
            "underflowed": 6 / 40,
            "largest": 2.0,
            "most_saturated": {"layer": "first", "share": 0.1},
            "most_underflowed": {"layer": "second", "share": 0.2},
        },
        "grad": {
            "saturated": 0.0,
            "underflowed": 0.0,
            "largest": 2.0,
            "most_saturated": None,
            "most_underflowed": None,
        },
    }


def test_uncalled_layer_has_no_share() -> None:
    found = summarize(statistics({"weight": [[0, 0, 0], [5, 0, 5]]}))
    assert found["weight"]["most_saturated"] == {"layer": "second", "share": 1.0}


def test_largest_of_non_finite_values_is_nan() -> None:
    found = summarize(statistics({"input": [[1, 0, 4]] * 2}, largest=math.nan))
    assert math.isnan(found["input"]["largest"])


# Times of hand-written traces in the format of torch 2.11 and 2.13.


MAIN, ENGINE, GLOO, DEVICE = 1, 2, 3, 7
BACKWARD = "autograd::engine::evaluate_function: MmBackward0"


def event(
    name: str, start: float, stop: float, category: str = "cpu_op", thread: int = MAIN
) -> dict[str, Any]:
    both = {"ph": "X", "cat": category, "name": name, "pid": 99, "tid": thread}
    return {**both, "ts": start, "dur": stop - start}


def phase(name: str, start: float, stop: float) -> dict[str, Any]:
    return event(name, start, stop, "user_annotation")


def gloo(start: float, stop: float) -> dict[str, Any]:
    return event("gloo:all_reduce", start, stop, "user_annotation", GLOO)


def kernel(name: str, start: float, stop: float) -> dict[str, Any]:
    return event(name, start, stop, "kernel", DEVICE)


CASES = {
    "operators of the main thread hide collectives": (
        [
            phase("step 5", 0, 100),
            event("aten::linear", 12, 38),
            event("aten::addmm", 13, 37),
            event(BACKWARD, 40, 70),  # its hooks wait for a collective
            event("FSDP::post_backward", 40, 70, "user_annotation"),
            event("MmBackward0", 41, 55),
            event("aten::mm", 42, 54),
            event("torch::autograd::AccumulateGrad", 56, 69),
            event("c10d::allreduce_", 57, 58),
            gloo(50, 66),
            gloo(66, 74),
            event("aten::_foreach_norm", 75, 77),
            gloo(77, 80),
            event("aten::_fused_adamw_", 84, 88, thread=ENGINE),
            gloo(84, 88),  # another thread hides nothing
        ],
        (100, 20 + 3 + 4),
        False,
    ),
    "pauses between steps are excluded": (
        [
            phase("step 1", 0, 60),
            phase("validation", 10, 40),
            gloo(8, 40),
            phase("saving a checkpoint", 40, 60),
            phase("step 2", 60, 70),
            gloo(62, 64),
        ],
        (10, 2),
        False,
    ),
    "compiled code computes": (
        [
            phase("step 1", 0, 50),
            event("CompiledFunctionBackward", 0, 50),
            event("## Call CompiledFxGraph abc ##", 10, 40),
            gloo(0, 50),
        ],
        (50, 20),
        False,
    ),
    "the device finishes after the host": (
        [
            phase("step 5", 0, 50),
            event("aten::mm", 20, 60),  # on CUDA only the device counts
            kernel("gemm", 14, 50),
            kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 40, 62),
            event("Memcpy DtoD", 60, 64, "gpu_memcpy", DEVICE),
            kernel("multi_tensor_apply_kernel", 66, 80),
        ],
        (80, 10),
        True,
    ),
    "gloo between devices is hidden behind kernels": (
        [phase("step 1", 0, 30), kernel("gemm", 0, 20), gloo(10, 25), kernel("gemm", 25, 30)],
        (30, 5),
        True,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_exposed_communication_agrees_with_trace(case: str) -> None:
    events, expected, on_cuda = CASES[case]
    found = measured(events, on_cuda=on_cuda)
    assert found == pytest.approx([1e-6 * microseconds for microseconds in expected])


def test_trace_without_steps_has_no_time() -> None:
    assert measured([event("aten::mm", 0, 10)], on_cuda=False) is None


def test_summary_names_slow_rank() -> None:
    ranks = [RankTimes(0, "a", 0.5, 0.1), RankTimes(1, "b", 0.5, 0.01)]
    exposed, slow = summary(ranks)
    assert exposed == "500.0 ms a step; exposed communication: 55.0 ms a step, 11%"
    assert slow.startswith("rank 1 on b slows down the others")
    assert slow.endswith("90.0 ms a step longer")


@pytest.mark.parametrize("count", [1, 2])
def test_summary_of_equal_ranks_has_one_line(count: int) -> None:
    ranks = [RankTimes(rank, "a", 0.5, 0.1) for rank in range(count)]
    assert [*summary(ranks)] == ["500.0 ms a step; exposed communication: 100.0 ms a step, 20%"]
