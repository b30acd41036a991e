from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmp.telemetry.profiling.breakdown import (
    Breakdown,
    TimeParts,
    divide,
    most_idle_phase,
    of_trace,
)
from distmp.telemetry.profiling.trace import Trace
from distmp.utils.intervals import Interval, union
from tests.telemetry.profiling.events import (
    ENGINE,
    event,
    gloo,
    kernel,
    launch,
    on_cpu,
    on_cuda,
    phase,
)
from tests.utils.test_intervals import moments

BACKWARD = "autograd::engine::evaluate_function: MmBackward0"
spans = st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50)), max_size=10).map(union)
integer_spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=10).map(union)


def times_of(kind: st.SearchStrategy[list[Interval]]) -> st.SearchStrategy[Any]:
    """Draw the arguments of `divide`."""
    names = ("window", "data", "communication", "optimizer", "computation")
    return st.fixed_dictionaries(dict.fromkeys(names, kind))


def microseconds(trace: Trace) -> Breakdown:
    found = of_trace(trace).breakdown(1)
    return Breakdown(*(round(1e6 * seconds, 6) for seconds in found))


@given(times_of(spans))
def test_parts_add_up_to_the_total(times: dict[str, list[Interval]]) -> None:
    parts = divide(**times)
    found = parts.breakdown(1)
    assert all(seconds >= 0 for seconds in found)
    expected = math.fsum(stop - start for start, stop in times["window"]) / 1e6
    assert found.total == pytest.approx(expected, abs=1e-12)


@given(times_of(integer_spans))
def test_every_moment_goes_to_the_first_matching_part(times: dict[str, list[Interval]]) -> None:
    found = divide(**times)
    expected: dict[str, set[int]] = {name: set() for name in TimeParts._fields}
    for time in moments(times["window"]):
        busy = time in moments(times["optimizer"]) | moments(times["computation"])
        if time in moments(times["data"]):
            expected["data"].add(time)
        elif time in moments(times["communication"]):
            expected["hidden" if busy else "exposed"].add(time)
        elif time in moments(times["optimizer"]):
            expected["optimizer"].add(time)
        else:
            expected["computation" if busy else "idle"].add(time)
    assert {name: moments(part) for name, part in found._asdict().items()} == expected


def test_a_step_on_a_cpu() -> None:
    trace = on_cpu(
        phase("step 5", 0, 100),
        phase("loading data", 0, 10),
        event("aten::stack", 2, 8),
        phase("forward of microbatch 1", 10, 40),
        event("aten::linear", 12, 38),
        event("aten::addmm", 13, 37),
        phase("backward of microbatch 1", 40, 70),
        event(BACKWARD, 40, 70),  # its hooks wait for a collective
        event("FSDP::post_backward", 40, 70, "user_annotation"),
        event("MmBackward0", 41, 55),
        event("aten::mm", 42, 54),
        event("torch::autograd::AccumulateGrad", 56, 69),
        event("c10d::allreduce_", 57, 58),
        gloo(50, 66),
        phase("reduction of the gradients", 70, 75),
        gloo(66, 74),
        phase("decision", 75, 80),
        event("aten::_foreach_norm", 75, 77),
        gloo(77, 80),
        phase("update", 80, 95),
        event("aten::_fused_adamw_", 82, 94),
        event("aten::_fused_adamw_", 84, 88, thread=ENGINE),  # in another thread
        phase("results of the step", 95, 100),
    )
    assert microseconds(trace) == Breakdown(
        computation=26 + 8, hidden=4, exposed=20 + 3, optimizer=2 + 12, data=10, idle=15
    )
    assert most_idle_phase(trace, of_trace(trace)) == "results of the step"


def test_pauses_between_steps_are_excluded() -> None:
    trace = on_cpu(
        phase("step 1", 0, 60),
        phase("forward of microbatch 1", 0, 10),
        event("aten::mm", 0, 10),
        phase("validation", 10, 40),
        event("aten::mm", 10, 40),
        phase("saving a checkpoint", 40, 60),
        phase("step 2", 60, 70),
        phase("forward of microbatch 1", 60, 70),
        event("aten::mm", 60, 65),
    )
    assert microseconds(trace) == Breakdown(15, 0, 0, 0, 0, 5)
    assert of_trace(trace).breakdown(2).total == pytest.approx(10e-6)
    assert list(trace.own_times()) == [("aten::mm", 10), ("aten::mm", 5)]


def test_steps_on_a_cuda_device() -> None:
    """The host runs ahead; only the time of the device counts, until it is done."""
    trace = on_cuda(
        phase("step 5", 0, 50),
        phase("loading data", 0, 10),
        phase("forward of microbatch 1", 10, 20),
        event("aten::mm", 11, 13, **{"External id": 40}),
        launch(1, 12),
        kernel("gemm", 14, 30, 1, **{"External id": 40}),
        phase("backward of microbatch 1", 20, 30),
        event("aten::mm", 20, 25, thread=ENGINE, **{"External id": 41}),
        launch(2, 21, ENGINE),
        kernel("gemm", 30, 50, 2, **{"External id": 41}),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 40, 62, 3),
        phase("decision", 30, 35),
        launch(4, 31),
        event("Memcpy DtoD", 62, 64, "gpu_memcpy", 7, correlation=4),
        phase("update", 35, 50),
        launch(5, 36),
        kernel("multi_tensor_apply_kernel", 66, 80, 5),
        # The next step's data arrive late, and the device is idle from 80 on.
        phase("step 6", 50, 100),
        phase("loading data", 50, 95),
        phase("forward of microbatch 1", 95, 100),
        launch(6, 96),
        kernel("gemm", 98, 110, 6, **{"External id": 42}),
    )
    assert microseconds(trace) == Breakdown(
        computation=16 + 10 + 12,
        hidden=10,
        exposed=12,
        optimizer=2 + 14,
        data=10 + 2 + 15,
        idle=4 + 3,
    )
    assert list(trace.own_times()) == [
        *(("aten::mm", 16), ("aten::mm", 20), ("Memcpy DtoD", 2)),
        *(("multi_tensor_apply_kernel", 14), ("gemm", 12)),
    ]
    assert microseconds(trace).total == 110


def test_gloo_between_devices_is_hidden_behind_kernels() -> None:
    trace = on_cuda(
        phase("step 1", 0, 30), kernel("gemm", 0, 20), gloo(10, 25), kernel("gemm", 25, 30)
    )
    assert microseconds(trace) == Breakdown(15, 10, 5, 0, 0, 0)


def test_compiled_code_computes() -> None:
    trace = on_cpu(
        phase("step 1", 0, 50),
        event("CompiledFunctionBackward", 0, 50),
        event("## Call CompiledFxGraph abc ##", 10, 40),
        event("aten::mm", 20, 30),
    )
    assert microseconds(trace) == Breakdown(30, 0, 0, 0, 0, 20)


def test_a_trace_without_steps_has_no_time() -> None:
    assert microseconds(on_cpu(event("aten::mm", 0, 10))).total == 0
