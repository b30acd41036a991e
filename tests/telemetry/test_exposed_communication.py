"""Times of hand-written traces in the format of torch 2.11 and 2.13."""

from __future__ import annotations

from typing import Any

import pytest

from distmp.telemetry.profiler import RankTimes, measured, summary

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
def test_exposed_communication(case: str) -> None:
    events, expected, on_cuda = CASES[case]
    found = measured(events, on_cuda=on_cuda)
    assert found == pytest.approx([1e-6 * microseconds for microseconds in expected])


def test_a_trace_without_steps_has_no_time() -> None:
    assert measured([event("aten::mm", 0, 10)], on_cuda=False) is None


def test_the_summary_names_a_slow_rank() -> None:
    ranks = [RankTimes(0, "a", 0.5, 0.1), RankTimes(1, "b", 0.5, 0.01)]
    exposed, slow = summary(ranks)
    assert exposed == "500.0 ms a step; exposed communication: 55.0 ms a step, 11%"
    assert slow.startswith("rank 1 on b slows down the others")
    assert slow.endswith("90.0 ms a step longer")


@pytest.mark.parametrize("count", [1, 2])
def test_equal_ranks_have_one_line(count: int) -> None:
    ranks = [RankTimes(rank, "a", 0.5, 0.1) for rank in range(count)]
    assert [*summary(ranks)] == ["500.0 ms a step; exposed communication: 100.0 ms a step, 20%"]
