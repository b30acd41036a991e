"""Times of hand-written traces in the format of torch 2.11 and 2.13."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from distmp.telemetry.exposed_communication import RankTimes, Summary, measured

PAGE = (Path(__file__).parents[2] / "docs" / "profiling.md").read_text()
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


def test_the_page_shows_the_lines_of_a_summary(tmp_path: Path) -> None:
    summary = Summary(20, 25, [RankTimes(0, "a", 0.5, 0.1), RankTimes(1, "b", 0.5, 0.01)])
    summary.write(tmp_path / "summary.json")
    assert Summary.read(tmp_path / "summary.json") == summary
    lines = [f"profile of {summary.title}; in runs/profiled/profile", *summary.notes()]
    assert lines[1].endswith("55.0 ms a step, 11%; 10.0 ms (rank 1) to 100.0 ms (rank 0)")
    assert lines[2].endswith("90.0 ms a step longer")
    (sample,) = re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL)
    for shown, line in zip(sample.splitlines(), lines, strict=True):
        assert re.fullmatch(re.escape(shown.strip()).replace(r"\.\.\.", ".+"), line), (shown, line)


def test_equal_ranks_have_one_line() -> None:
    ranks = [RankTimes(rank, "a", 0.5, 0.1) for rank in range(2)]
    assert Summary(2, 2, ranks).notes() == ["exposed communication: 100.0 ms a step, 20%"]
