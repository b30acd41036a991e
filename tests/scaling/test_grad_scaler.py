"""As a replacement of torch's scaler: the same bits in one process, and intended differences."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from distmp import ConfigError, DistributedGradScaler, TrainingError
from distmp.scaling import grad_scaler
from distmp.utils.host_copy import HostCopy
from tests.ranks import from_all_ranks, ranks, run_ranks
from tests.recording import no_waiting

Scaler = torch.amp.GradScaler
BOTH = (Scaler, DistributedGradScaler)
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "fused sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "foreach adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
}


class Work:
    """Two small models with one optimizer each, and inputs, some of which overflow."""

    def __init__(self, scaler: Scaler, kind: str) -> None:
        torch.manual_seed(0)
        self.scaler = scaler
        self.models = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in "ab"]
        self.optimizers = [KINDS[kind](model.parameters()) for model in self.models]
        self.scales: list[float] = []

    def loss(self, step: int, model: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + model)
        inputs = torch.randn(3, 4, generator=generator)
        if step % 5 == 3:
            inputs = inputs * math.inf
        return F.mse_loss(self.models[model](inputs), torch.ones(3, 2))

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def result(self) -> list[Any]:
        weights = [p.tolist() for model in self.models for p in model.parameters()]
        moments = [
            value.tolist()
            for optimizer in self.optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        return [self.scales, weights, moments]


# The patterns of torch's "Automatic Mixed Precision examples".


def typical(work: Work, step: int) -> None:
    work.scaler.scale(work.loss(step)).backward()
    work.scaler.step(work.optimizers[0])


def clipping(work: Work, step: int) -> None:
    work.scaler.scale(work.loss(step)).backward()
    work.scaler.unscale_(work.optimizers[0])
    nn.utils.clip_grad_norm_(work.models[0].parameters(), 0.1)
    work.scaler.step(work.optimizers[0])


def accumulation(work: Work, step: int) -> None:
    for part in range(2):
        work.scaler.scale(work.loss(5 * step + part) / 2).backward()
    work.scaler.step(work.optimizers[0])


def penalty(work: Work, step: int) -> None:
    loss, parameters = work.loss(step), list(work.models[0].parameters())
    scaled = torch.autograd.grad(work.scaler.scale(loss), parameters, create_graph=True)
    norm = sum((grad / work.scaler.get_scale()).pow(2).sum() for grad in scaled)
    work.scaler.scale(loss + norm).backward()
    work.scaler.step(work.optimizers[0])


def two_losses_and_optimizers(work: Work, step: int) -> None:
    losses = [work.loss(step, 0), work.loss(step + 1, 1)]
    for loss in work.scaler.scale(losses):
        loss.backward()
    work.scaler.unscale_(work.optimizers[0])
    work.scaler.step(work.optimizers[0])
    work.scaler.step(work.optimizers[1])


def alternating(work: Work, step: int) -> None:
    for index, optimizer in enumerate(work.optimizers):
        work.scaler.scale(work.loss(step + index, index)).backward()
        work.scaler.step(optimizer)


PATTERNS = (typical, clipping, accumulation, penalty, two_losses_and_optimizers, alternating)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_documented_patterns_give_the_bits_of_torch(
    pattern: Callable[[Work, int], None], kind: str
) -> None:
    results = []
    for scaler in BOTH:
        work = Work(scaler("cpu", 2.0**12, growth_interval=2), kind)
        for step in range(20):
            work.zero_grad()
            pattern(work, step)
            work.scaler.update()
            work.scales.append(work.scaler.get_scale())
        results.append(work.result())
    assert len(set(results[0][0])) > 2
    assert str(results[0]) == str(results[1])


def one_parameter(*gradient: float, fused: bool = False) -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.zeros(len(gradient)))
    parameter.grad = torch.tensor(gradient)
    return torch.optim.Adam([parameter], fused=fused)


def apply(scaler: Scaler, optimizer: torch.optim.Optimizer) -> None:
    """Apply the gradients of a loss."""
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()


def misuse(scaler: Scaler, optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], Any]]:
    """Yield calls that torch refuses."""
    yield lambda: scaler.step(optimizer)
    yield lambda: scaler.unscale_(optimizer)
    yield scaler.update
    yield lambda: scaler.scale(1.0)  # type: ignore[call-overload]
    yield lambda: scaler.load_state_dict({})
    scaler.scale(torch.ones(()))
    yield scaler.update
    yield lambda: scaler.update(torch.ones(2))
    yield lambda: scaler.update(torch.ones(1, requires_grad=True))
    scaler.unscale_(optimizer)
    yield lambda: scaler.unscale_(optimizer)
    yield lambda: pickle.dumps(scaler)
    scaler.step(optimizer)
    yield lambda: scaler.unscale_(optimizer)
    yield lambda: scaler.step(optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_misuse_raises_what_torch_raises(fused: bool) -> None:
    errors: list[list[str]] = []
    for scaler in BOTH:
        errors.append([])
        for call in misuse(scaler("cpu"), one_parameter(1.0, fused=fused)):
            with pytest.raises(Exception) as raised:  # noqa: PT011
                call()
            text = repr(raised.value)  # the message about a missing scale is shorter than torch's
            missing = "scaler.scale(loss" in text
            errors[-1].append(type(raised.value).__name__ if missing else text)
    assert errors[0] == errors[1]


@pytest.mark.parametrize("scales", [False, True])
def test_closure_is_refused(scales: bool) -> None:
    """The optimizer would call it after the gradients were unscaled, and step with scaled ones."""
    scaler, optimizer = DistributedGradScaler("cpu"), one_parameter(1.0)
    if scales:
        scaler.scale(torch.ones(()))
    problem = r"closure = 'function': .*call closure\(\) yourself.*LBFGS, cannot be used with"
    for call in (
        lambda: scaler.step(optimizer, lambda: None),
        lambda: scaler.step(optimizer, closure=lambda: None),
    ):
        with pytest.raises(ConfigError, match=problem):
            call()
    for arguments, keywords in (((None,), {}), ((), {"closure": None})):
        scaler.scale(torch.ones(()))
        scaler.step(optimizer, *arguments, **keywords)
        scaler.update()
    calls: list[int] = []
    disabled = DistributedGradScaler(enabled=False)
    disabled.step(optimizer, lambda: calls.append(1))
    disabled.step(optimizer, closure=lambda: calls.append(2))
    assert calls == [1, 2]


@pytest.mark.parametrize(
    ("optimizers", "shown"), [(None, "None"), (one_parameter(1.0), "'Adam'")], ids=["none", "one"]
)
def test_optimizers_other_than_a_list_are_refused(optimizers: Any, shown: str) -> None:
    with pytest.raises(ConfigError) as raised:
        DistributedGradScaler("cpu", optimizers=optimizers)
    expected = f"optimizers = {shown}: use a list of optimizers: optimizers=[optimizer]"
    assert str(raised.value) == expected


@pytest.mark.parametrize("name", ["scale", "_growth_tracker"])
def test_incomplete_state_is_refused(name: str) -> None:
    scaler = DistributedGradScaler("cpu")
    state = scaler.state_dict()
    state.pop(name)
    with pytest.raises(ConfigError, match=f"is not the state of a scaler; {name} is missing"):
        scaler.load_state_dict(state)


@pytest.mark.parametrize("options", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}], ids=str)
def test_constructor_refuses_what_torch_refuses(options: dict[str, float]) -> None:
    messages = []
    for scaler in BOTH:
        with pytest.raises(AssertionError) as raised:
            scaler("cpu", **options)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"init_scale": 0.0}, "init_scale"),
        ({"init_scale": math.nan}, "init_scale"),
        ({"init_scale": 2.0, "min_scale": 4.0}, "init_scale"),
        ({"min_scale": -1.0}, "min_scale"),
        ({"max_scale": math.inf}, "max_scale"),
        ({"growth_factor": math.inf}, "growth_factor"),
        ({"backoff_factor": 0.0}, "backoff_factor"),
        ({"hysteresis": 0}, "hysteresis"),
        ({"max_consecutive_skips": 0}, "max_consecutive_skips"),
    ],
)
def test_invalid_numbers_are_refused(options: dict[str, Any], setting: str) -> None:
    with pytest.raises(ConfigError, match=f"^{setting} = "):
        DistributedGradScaler("cpu", **options)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_invalid_scales_are_refused(value: float) -> None:
    scaler = DistributedGradScaler("cpu")
    scaler.scale(torch.ones(()))
    for new_scale in (value, torch.tensor(value)):
        with pytest.raises(ConfigError, match="new_scale"):
            scaler.update(new_scale)
    state = {**scaler.state_dict(), "scale": value}
    scaler.load_state_dict(state)
    assert scaler.get_scale() == 2.0**16
    with pytest.raises(ConfigError, match="backoff_factor"):
        scaler.set_backoff_factor(value if value <= 0 else math.nan)


def test_a_loaded_state_ends_the_report_of_the_steps_before_it() -> None:
    """On a GPU each report is read one update later."""
    scaler = DistributedGradScaler("cpu", init_scale=1.0)
    state = {**scaler.state_dict(), "scale": 4.0}
    with mock.patch.object(grad_scaler, "HostCopy", on_device):
        apply(scaler, one_parameter(math.inf))
        scaler.load_state_dict(state)
        for _ in range(3):
            apply(scaler, one_parameter(1.0))


def test_a_loaded_state_does_not_hide_that_the_scale_differed_between_ranks() -> None:
    run_ranks(load_after_different_scales, 2)


def load_after_different_scales() -> None:
    scaler = DistributedGradScaler("cpu", init_scale=2.0 ** (1 + dist.get_rank()))
    state = scaler.state_dict()
    with mock.patch.object(grad_scaler, "HostCopy", on_device):
        apply(scaler, one_parameter(1.0))
        with pytest.raises(TrainingError, match="the loss scale differs between ranks"):
            scaler.load_state_dict(state)
        scaler.load_state_dict(state)


def on_device(tensor: Tensor) -> HostCopy:
    copied = HostCopy(tensor)
    copied.on_device = True
    return copied


def test_setters_change_the_rules() -> None:
    scaler = DistributedGradScaler("cpu", init_scale=16.0)
    optimizer = one_parameter(1.0)
    for _ in range(2):  # before and after the scale is created
        scaler.set_growth_factor(4.0)
        scaler.set_growth_interval(1)
        apply(scaler, optimizer)
    assert scaler.get_scale() == 16.0 * 4 * 4


def test_factors_that_fp32_cannot_hold_give_the_scales_of_torch() -> None:
    scales: list[list[float]] = []
    for kind in BOTH:
        scaler = kind("cpu", 1000.0, growth_factor=1.1, backoff_factor=0.7, growth_interval=1)
        scaler.scale(torch.ones(()))
        scales.append([])
        for step in range(30):
            scaler.step(one_parameter(math.nan if step % 4 == 3 else 1.0))
            scaler.update()
            scales[-1].append(scaler.get_scale())
    assert scales[0] == scales[1]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("max_norm", [math.nan, -1.0, 0.0])
def test_gradients_are_not_clipped_to_a_norm_that_is_not_above_zero(
    max_norm: float, enabled: bool
) -> None:
    optimizer = one_parameter(3.0, 4.0)
    scaler = DistributedGradScaler("cpu", enabled=enabled, optimizers=[optimizer])
    scaler.scale(torch.ones(()))
    with pytest.raises(ConfigError, match=r"max_norm = \S+: use a number above 0"):
        scaler.clip_grad_norm_(optimizer, max_norm)
    (parameter,) = optimizer.param_groups[0]["params"]
    assert parameter.grad.tolist() == [3, 4]


def test_disabled_scaler_does_nothing() -> None:
    optimizer = one_parameter(3.0, 4.0)
    scaler = DistributedGradScaler("cpu", enabled=False, optimizers=[optimizer])
    loss = torch.ones(())
    assert scaler.scale(loss) is loss
    scaler.unscale_(optimizer)
    assert scaler.clip_grad_norm_(optimizer, 1.0) == 5
    (parameter,) = optimizer.param_groups[0]["params"]
    assert torch.allclose(parameter.grad, torch.tensor([0.6, 0.8]))
    scaler.step(optimizer)
    scaler.update()
    assert parameter[0] < 0
    assert (scaler.step_skipped, scaler.total_skips, scaler.state_dict()) == (False, 0, {})


def test_state_can_be_exchanged_with_torch(caplog: pytest.LogCaptureFixture) -> None:
    ours = DistributedGradScaler("cpu", init_scale=64.0, growth_interval=5)
    optimizer = one_parameter(math.nan)
    ours.scale(torch.ones(()))
    ours.step(optimizer)
    ours.update()
    torchs = Scaler("cpu")
    torchs.load_state_dict(ours.state_dict())
    assert (torchs.get_scale(), torchs.get_growth_interval()) == (32.0, 5)
    torchs.load_state_dict({**torchs.state_dict(), "_growth_tracker": 3})
    back = DistributedGradScaler("cpu", growth_interval=7)
    with caplog.at_level(logging.WARNING, "distmp"):
        back.load_state_dict(torchs.state_dict())
    assert "growth_interval = 5; this one keeps 7" in caplog.text
    assert (back.get_scale(), back._get_growth_tracker()) == (32.0, 3)
    assert (back.get_growth_interval(), back.total_skips) == (7, 0)


@pytest.mark.parametrize("copied", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy])
def test_copied_scaler_continues(copied: Callable[[Any], Any]) -> None:
    scaler = DistributedGradScaler("cpu", init_scale=64.0, hysteresis=2)
    optimizer = one_parameter(math.nan)
    scaler.scale(torch.ones(()))
    for expected in (64.0, 32.0):
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == expected
        scaler = copied(scaler)
        assert scaler.get_scale() == expected
        scaler.scale(torch.ones(()))
    assert (scaler.consecutive_skips, scaler.total_skips) == (2, 2)


@pytest.mark.parametrize("registered", [False, True])
def test_copy_reports_that_it_forgets_optimizers(
    registered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    optimizers = [one_parameter(1.0)] if registered else []
    copy.deepcopy(DistributedGradScaler("cpu", optimizers=optimizers))
    assert ("call register(...) on the copy" in caplog.text) == registered


def test_scheduler_is_not_stepped_after_a_skip() -> None:
    optimizer, scaler = one_parameter(1.0, fused=True), DistributedGradScaler("cpu")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    (parameter,) = optimizer.param_groups[0]["params"]
    rates = []
    for value in (1.0, math.inf, math.inf, 1.0):
        parameter.grad = torch.tensor([value])
        apply(scaler, optimizer)
        scaler.step_scheduler(scheduler)
        rates.append((scheduler.get_last_lr()[0] / 1e-3, scaler.consecutive_skips))
    assert rates == [(0.5, 0), (0.5, 1), (0.5, 2), (0.25, 0)]
    assert scaler.total_skips == 2


@pytest.mark.parametrize("registered", [False, True])
def test_schedulers_follow_their_own_optimizers(registered: bool) -> None:
    optimizers = [one_parameter(1.0), one_parameter(math.inf), one_parameter(1.0)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]
    before = [scheduler.get_last_lr()[0] for scheduler in schedulers]
    scaler = DistributedGradScaler("cpu", optimizers=optimizers if registered else ())
    scaler.scale(torch.ones(()))
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    for scheduler in schedulers:
        scaler.step_scheduler(scheduler)
    factors = [each.get_last_lr()[0] / lr for each, lr in zip(schedulers, before, strict=True)]
    assert factors == ([1, 1, 1] if registered else [0.5, 1, 0.5])


def test_loaded_scaler_does_not_know_a_skip_of_its_former_state() -> None:
    scaler, optimizer = DistributedGradScaler("cpu"), one_parameter(math.inf)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    state = scaler.state_dict()
    apply(scaler, optimizer)
    assert scaler.step_skipped
    scaler.load_state_dict(state)
    assert not scaler.step_skipped
    before = scheduler.get_last_lr()[0]
    scaler.step_scheduler(scheduler)
    assert scheduler.get_last_lr()[0] == before / 2
    # Between two steps of an iteration, too.
    scaler.step(one_parameter(math.inf))
    scaler.load_state_dict(state)
    scaler.step(one_parameter(1.0))
    scaler.update()


def test_fp16_gradients_are_unscaled_in_fp32() -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    gradient = torch.tensor([60000.0, 1000.0, 3.0], dtype=torch.float16)
    parameter.grad = gradient.clone()
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), DistributedGradScaler("cpu")
    scaler.scale(torch.ones(()))
    norm = scaler.clip_grad_norm_(optimizer, 1e9)
    assert math.isclose(norm.item(), gradient.double().norm().item() / 2**16, rel_tol=1e-6)
    scaler.step(optimizer)
    assert torch.equal(parameter, (-gradient.float() / 2.0**16).half())


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("lazily_conjugated", [False, True])
def test_complex_gradients(lazily_conjugated: bool, clips: bool) -> None:
    results = []
    for imaginary in (8.0, math.inf):
        gradient = torch.tensor([complex(6.0, imaginary)])
        parameter = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
        parameter.grad = gradient.conj() if lazily_conjugated else gradient
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler = DistributedGradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))
        norm = scaler.clip_grad_norm_(optimizer, 2.5) if clips else None
        scaler.step(optimizer)
        results.append((scaler.step_skipped, parameter.item()))
        if norm is not None:
            assert norm.item() == (5.0 if imaginary == 8 else math.inf)
    sign = 1 if lazily_conjugated else -1
    wanted = complex(-1.5, 2 * sign) if clips else complex(-3, 4 * sign)
    assert results[0] == (False, pytest.approx(wanted))
    assert results[1] == (True, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sparse_gradients(dtype: torch.dtype) -> None:
    results = []
    for last in (40000.0, 40000.0 if dtype is torch.float16 else math.inf):
        rows = torch.tensor([[0, 2, 2]])
        first = 1.0 if not results else last
        values = torch.tensor([[4.0], [first], [last]], dtype=dtype)
        parameter = nn.Parameter(torch.zeros(3, 1, dtype=dtype))
        parameter.grad = torch.sparse_coo_tensor(rows, values, (3, 1), check_invariants=True)
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler = DistributedGradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        results.append((scaler.step_skipped, parameter.flatten().tolist()))
    sum_of_two = float(torch.tensor(40001.0, dtype=dtype) / 4)
    assert results == [(False, [-1.0, 0.0, -sum_of_two]), (True, [0.0, 0.0, 0.0])]


def uncoalesced(dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor]:
    """Return a sparse gradient with several values for one index, and the same as dense."""
    rows = torch.tensor([[0, 2, 2, 1, 2, 0]])
    values = torch.tensor([[4.0, 3], [1, -2], [9, 5], [7, 0.5], [-3, 8], [2, 6]])
    scaled = (values * scale).to(dtype)
    sparse = torch.sparse_coo_tensor(rows, scaled, (4, 2), check_invariants=True)
    return sparse, torch.zeros(4, 2).index_add_(0, rows[0], values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("way", ["clip", "clip disabled", "unscale"])
def test_uncoalesced_sparse_gradients_as_dense_ones(dtype: torch.dtype, way: str) -> None:
    scale = 1.0 if "disabled" in way else 4.0
    sparse, gradient = uncoalesced(dtype, scale)
    dense = nn.Parameter(torch.zeros(4, 2))
    dense.grad = gradient.clone()
    parameter = nn.Parameter(torch.zeros(4, 2, dtype=dtype))
    parameter.grad = sparse
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = DistributedGradScaler("cpu", init_scale=4.0, enabled="disabled" not in way)
    scaler.scale(torch.ones(()))
    if way == "unscale":
        scaler.unscale_(optimizer)
    else:
        norm = scaler.clip_grad_norm_(optimizer, 2.0)
        expected = nn.utils.clip_grad_norm_([dense], 2.0)
        assert math.isclose(norm.item(), expected.item(), rel_tol=1e-5)
    scaler.step(optimizer)
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-6)
    assert parameter.grad.is_sparse
    for found in (parameter.grad.to_dense(), -parameter.detach()):
        torch.testing.assert_close(found.float(), dense.grad, rtol=tolerance, atol=tolerance)


def test_sum_of_finite_sparse_values_that_overflows_is_skipped() -> None:
    parameter = nn.Parameter(torch.zeros(2, 1))
    values = torch.tensor([[3e38], [3e38]])
    index = torch.tensor([[1, 1]])
    parameter.grad = torch.sparse_coo_tensor(index, values, (2, 1), check_invariants=True)
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), DistributedGradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert scaler.step_skipped
    assert not parameter.any()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_clipping_equals_that_of_torch(max_norm: float, fused: bool) -> None:
    weights = []
    for scaler in BOTH:
        work = Work(scaler("cpu", 2.0**8), "fused adamw" if fused else "foreach adamw")
        parameters = [p for model in work.models for p in model.parameters()]
        for step in (0, 1, 2, 4):
            for model in range(2):
                scaled = work.scaler.scale(50 * work.loss(step, model))
                scaled.backward()
            if isinstance(work.scaler, DistributedGradScaler):
                norm = work.scaler.clip_grad_norm_(work.optimizers, max_norm)
            else:
                for optimizer in work.optimizers:
                    work.scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(parameters, max_norm)
            for optimizer in work.optimizers:
                work.scaler.step(optimizer)
            work.scaler.update()
            work.zero_grad()
        weights.append(torch.cat([p.detach().flatten() for p in parameters] + [norm.view(1)]))
    assert torch.allclose(weights[0], weights[1].float(), rtol=1e-5, atol=1e-7)
    assert weights[0][-1] > 1


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("size", [1e-25, 1e20, 3e38])
def test_clipping_of_gradients_whose_squares_are_beyond_fp32(
    size: float, fused: bool, enabled: bool
) -> None:
    scale, parameter = 4.0 if enabled else 1.0, nn.Parameter(torch.zeros(16))
    parameter.grad = size * torch.linspace(-1, 1, 16)
    exact = parameter.grad.double() / scale
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    scaler = DistributedGradScaler("cpu", init_scale=4.0, enabled=enabled)
    scaler.scale(torch.ones(()))
    norm = scaler.clip_grad_norm_(optimizer, 1e-3)
    scaler.step(optimizer)
    assert norm.item() == pytest.approx(exact.norm().item(), rel=1e-6, abs=0)
    clipped = exact * min(1.0, 1e-3 / (exact.norm().item() + 1e-6))
    torch.testing.assert_close(parameter.double(), -clipped, rtol=1e-6, atol=0)


@pytest.mark.parametrize("enabled", [False, True])
def test_an_optimizer_that_is_named_twice_counts_once(enabled: bool) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = DistributedGradScaler("cpu", init_scale=1.0, enabled=enabled)
    scaler.scale(torch.ones(()))
    assert scaler.clip_grad_norm_([optimizer, optimizer], 1.0) == 5.0
    scaler.step(optimizer)
    torch.testing.assert_close(parameter.detach(), torch.tensor([-0.6, -0.8]))


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("second_norm", [100.0, 0.25, 1e-39])
def test_clipping_again_clips_the_clipped_gradient(
    second_norm: float, fused: bool, enabled: bool
) -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in "ab"]
    first, second = (torch.optim.SGD([each], lr=1.0, fused=fused) for each in parameters)
    for parameter, value in zip(parameters, (3.0, 4.0), strict=True):
        parameter.grad = torch.tensor([8 * value if enabled else value])
    scaler = DistributedGradScaler("cpu", init_scale=8.0, enabled=enabled)
    scaler.scale(torch.ones(()))
    assert scaler.clip_grad_norm_([first, second], 1.0) == 5.0
    assert scaler.clip_grad_norm_(first, second_norm).item() == pytest.approx(0.6)
    for optimizer in (first, second):
        scaler.step(optimizer)
    clipped = min(0.6, second_norm)
    assert [-each.item() for each in parameters] == pytest.approx([clipped, 0.8], rel=1e-5, abs=0)


@pytest.mark.parametrize("clips", [False, True])
def test_step_after_a_failed_one_divides_once(clips: bool) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    scaler = DistributedGradScaler("cpu", init_scale=4.0)
    parameter.grad = torch.tensor([12.0, 16.0])
    scaler.scale(torch.ones(()))
    if clips:
        scaler.clip_grad_norm_(optimizer, 10.0)
    with mock.patch.object(optimizer, "step", side_effect=MemoryError), pytest.raises(MemoryError):
        scaler.step(optimizer)
    scaler.step(optimizer)
    torch.testing.assert_close(parameter.detach(), torch.tensor([-3.0, -4.0]))


@pytest.mark.parametrize("fused", [False, True])
def test_unscaling_after_clipping_shows_the_gradient_that_is_stepped_with(fused: bool) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([12.0, 16.0])
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    scaler = DistributedGradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    assert scaler.clip_grad_norm_(optimizer, 1.0) == 5.0
    scaler.unscale_(optimizer)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))
    scaler.step(optimizer)
    torch.testing.assert_close(parameter.detach(), torch.tensor([-0.6, -0.8]))


@ranks(2, initialize=False)
def test_several_processes_without_a_process_group(tmp_path: Path) -> None:
    optimizer, scaler = one_parameter(1.0), DistributedGradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    message = r"^WORLD_SIZE = '2': .* call torch\.distributed\.init_process_group\(\) in every"
    disabled = DistributedGradScaler("cpu", enabled=False)
    for call in (
        lambda: scaler.step(optimizer),
        lambda: scaler.clip_grad_norm_(optimizer, 1.0),
        lambda: DistributedGradScaler("cpu").update(),
        lambda: disabled.clip_grad_norm_(optimizer, 1.0),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
    assert optimizer.param_groups[0]["params"][0].item() == 0.0
    # A scaler that was built before the process group works too, as in a plugin of Fabric.
    store = dist.FileStore(str(tmp_path / "store"), 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    optimizer = one_parameter(math.inf if dist.get_rank() == 1 else 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.step_skipped, scaler.get_scale()) == (True, 2.0)


@pytest.mark.parametrize("named", ["1", None])
def test_one_process_needs_no_process_group(
    named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if named is not None:
        monkeypatch.setenv("WORLD_SIZE", named)
    optimizer, scaler = one_parameter(1.0), DistributedGradScaler("cpu")
    apply(scaler, optimizer)
    assert not scaler.step_skipped


def test_clipping_replaces_unscaling() -> None:
    optimizer, scaler = one_parameter(1.0), DistributedGradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="instead of unscale_"):
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"call scaler\.update\(\) after step\(\)"):
        scaler.clip_grad_norm_(optimizer, 1.0)


def test_late_gradients_of_registered_optimizer_are_refused() -> None:
    optimizers = [one_parameter(1.0), one_parameter(1.0)]
    scaler = DistributedGradScaler("cpu", optimizers=optimizers)
    scaler.scale(torch.ones(()))
    scaler.step(optimizers[0])
    optimizers[1].param_groups[0]["params"][0].grad.fill_(math.nan)
    with pytest.raises(RuntimeError, match="gradients changed"):
        scaler.step(optimizers[1])


@pytest.mark.parametrize("fused", [False, True])
def test_update_ends_an_iteration_that_was_abandoned(fused: bool) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.125, fused=fused)
    scaler = DistributedGradScaler("cpu")

    def clip_next() -> None:
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.clip_grad_norm_(optimizer, 100.0)

    for abandoned in (clip_next, lambda: scaler.unscale_(optimizer)):
        abandoned()
        with pytest.raises(RuntimeError, match=r"error, call scaler\.update\(\)"):  # noqa: PT012
            clip_next()
            scaler.step(optimizer)
        scaler.update()
    clip_next()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, torch.full((2,), 0.875))


@pytest.mark.parametrize("scaler", [DistributedGradScaler, torch.amp.GradScaler])
def test_overflow_counts_after_gradients_were_cleared(scaler: Any) -> None:
    optimizer = one_parameter(math.inf)
    scaler = scaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    optimizer.zero_grad()  # as an optimizer with two steps does, before `update`
    scaler.update()
    assert scaler.get_scale() == 512.0


def test_partial_update_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    optimizers = [one_parameter(1.0), one_parameter(math.inf)]
    scaler = DistributedGradScaler("cpu")
    scaler.scale(torch.ones(()))
    for _ in range(2):
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert len(caplog.records) == 1
    # Registering those of a GAN, which have a backward pass each, would raise an error.
    assert "if one backward pass computes the gradients of both" in caplog.text
    assert "optimizers=[...]" in caplog.text


def test_error_at_the_floor_names_parameters() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.named_parameters())
    scaler = DistributedGradScaler("cpu", init_scale=2.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model[1].bias.grad.fill_(math.nan)  # type: ignore[union-attr, operator]
    apply(scaler, optimizer)
    scaler.step(optimizer)
    with pytest.raises(TrainingError, match=r"min_scale\); not finite on this rank: 1\.bias\. "):
        scaler.update()


def test_static_scale_ends_after_consecutive_skips() -> None:
    scaler = DistributedGradScaler("cpu", init_scale=8.0, static=True, max_consecutive_skips=3)
    optimizer = one_parameter(math.nan)
    scaler.scale(torch.ones(()))
    for _ in range(2):
        scaler.step(optimizer)
        scaler.update()
    scaler.step(optimizer)
    with pytest.raises(TrainingError, match=r"3 steps in a row .* parameter 0 of group 0 \(1,\)"):
        scaler.update()
    assert scaler.get_scale() == 8.0


def test_fused_sgd_with_momentum_survives_a_skipped_start() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9, dampening=0.5, fused=True)
    scaler = DistributedGradScaler("cpu")
    scaler.scale(torch.ones(()))
    for value in (math.inf, 2.0**16):
        parameter.grad = torch.full((2,), value)
        scaler.step(optimizer)
        scaler.update()
        scaler.scale(torch.ones(()))
    assert parameter.tolist() == [-2.0, -2.0]  # the scale had been halved


class LegacyOptimizer(torch.optim.SGD):
    """An optimizer that calls the scaler itself."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:  # type: ignore[override]
        flags = grad_scaler._check_inf_per_device(self)
        if not any(flag.item() for flag in flags.values()):
            super().step()


@ranks(2)
def test_optimizer_that_asks_the_scaler_gets_the_flag_of_all_ranks() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([math.inf if dist.get_rank() == 1 else 1.0])
    optimizer, scaler = LegacyOptimizer([parameter], lr=1.0), DistributedGradScaler("cpu")
    with pytest.warns(FutureWarning):
        scaler.step(optimizer)
    scaler.update()
    assert (parameter.item(), scaler.get_scale()) == (0.0, 2.0**15)


@ranks(2)
def test_one_reduction_decides_for_all_registered_optimizers() -> None:
    optimizers = [one_parameter(1.0, fused=fused) for fused in (True, False, True)]
    scaler = DistributedGradScaler("cpu", optimizers=optimizers)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        scaler.unscale_(optimizers[1])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert reduce.call_count == 1
        scaler.clip_grad_norm_(optimizers, 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert reduce.call_count == 2
    assert reduce.call_args.args[0].numel() == 8  # docs/scaler.md: "eight numbers"


def test_single_process_reduces_nothing() -> None:
    with mock.patch.object(dist, "all_reduce") as reduce:
        scaler, optimizer = DistributedGradScaler("cpu"), one_parameter(1.0)
        apply(scaler, optimizer)
    reduce.assert_not_called()


@pytest.mark.parametrize("fused", [False, True])
def test_host_reads_the_flag_once_without_and_never_with_a_fused_optimizer(fused: bool) -> None:
    optimizer, scaler = one_parameter(1.0, fused=fused), DistributedGradScaler("cpu")
    scaler.scale(torch.ones(()))
    reads = []
    item = Tensor.item
    with mock.patch.object(Tensor, "item", lambda tensor: reads.append(tensor) or item(tensor)):
        scaler.step(optimizer)
    flags = [tensor for tensor in reads if tensor is scaler._latest_found_inf]
    assert len(flags) == (0 if fused else 1)


@ranks(2)
def test_different_scales_raise_on_all_ranks() -> None:
    optimizer = one_parameter(1.0)
    scaler = DistributedGradScaler("cpu", init_scale=2.0 ** (10 + dist.get_rank()))
    scaler.step(optimizer)
    with pytest.raises(TrainingError, match="differs between ranks"):
        scaler.update()
    assert optimizer.param_groups[0]["params"][0].item() == 0.0


@ranks(4)
def test_groups_and_meshes() -> None:
    me = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    pair = next(group for group in pairs() if me in dist.get_process_group_ranks(group))
    for group, skipping in [
        (None, {0, 1, 2, 3}),
        (mesh, {0, 1, 2, 3}),
        (mesh["tp"], {0, 1}),
        (mesh["dp"], {1, 3}),
        (pair, {1, 2}),
    ]:
        scaler = DistributedGradScaler("cpu", group=group)
        optimizer = one_parameter(math.nan if me == 1 else 1.0)
        scaler.step(optimizer)
        assert scaler.step_skipped == (me in skipping), group
    if me > 1:
        foreign = dist.new_group([0, 1])
    else:
        dist.new_group([0, 1])
        return
    with pytest.raises(ConfigError, match="does not contain this rank"):
        DistributedGradScaler("cpu", group=foreign)


def pairs() -> list[dist.ProcessGroup]:
    groups = [dist.new_group(members) for members in ([1, 2], [0, 3])]
    return [group for group in groups if not isinstance(group, int)]


def train(steps: int, overflowing: dict[int, int], device: str = "cpu") -> tuple[Any, ...]:
    """Train on the same data on all ranks, but some ranks overflow in some steps."""
    me, skips = (dist.get_rank(), False) if dist.is_initialized() else (0, True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = DistributedGradScaler(device, growth_interval=50)
    for step in range(steps):
        if skips and step in overflowing:
            continue
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(inputs), inputs.sum(1, keepdim=True))).backward()
        if overflowing.get(step) == me:
            model[0].weight.grad[0, 0] = math.inf  # type: ignore[union-attr, index]
        scaler.step(optimizer)
        scaler.update()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    values = [tensor.detach().tolist() for tensor in (*model.parameters(), *moments)]
    return scaler.get_scale(), scaler.total_skips, values


@pytest.mark.slow
def test_600_steps_with_overflows_equal_a_run_that_leaves_these_steps_out() -> None:
    generator = torch.Generator().manual_seed(0)
    chance = torch.rand(600, generator=generator)
    culprits = torch.randint(2, (600,), generator=generator).tolist()
    overflowing = {step: culprits[step] for step in range(600) if chance[step] < 0.03}
    assert len(set(overflowing.values())) == 2
    first, second = run_ranks(train, 2, 600, overflowing, timeout=100)
    assert first == second
    assert first[1] == len(overflowing) > 10
    assert first[2] == train(600, overflowing)[2]


@pytest.mark.gpu
def test_two_ranks_with_gpus_skip_together() -> None:
    overflowing = {3: 1, 4: 0, 20: 1}
    first, second = run_ranks(train, 2, 80, overflowing, "cuda", timeout=100, cuda=True)
    assert first == second
    assert first[1] == len(overflowing)
    assert first[2] == train(80, overflowing, "cuda")[2]


@pytest.mark.gpu
@pytest.mark.parametrize("clips", [False, True])
def test_on_a_gpu_the_bits_of_torch_without_its_waiting(clips: bool) -> None:
    (their_scale, *theirs), (our_scale, *ours) = (own_loop(kind, clips=clips) for kind in BOTH)
    assert our_scale == their_scale
    for found, expected in zip(ours, theirs, strict=True):
        # Clipping is folded into the update, which rounds differently.
        torch.testing.assert_close(found, expected, rtol=1e-4 * clips, atol=1e-6 * clips)


def own_loop(kind: type[Scaler], *, clips: bool, device: str = "cuda") -> list[Any]:
    """Train with two overflows; our scaler does not wait after the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler: Any = kind(device, growth_interval=4)
    inputs = torch.randn(16, 8, 3).to(device)
    ours = kind is DistributedGradScaler
    for step in range(16):
        with no_waiting() if ours and step else contextlib.nullcontext():
            optimizer.zero_grad()
            with torch.autocast(device, torch.float16):
                loss = model(inputs[step]).float().square().mean()
            scaler.scale(loss * (math.inf if step in (3, 9) else 1.0)).backward()
            if clips and ours:
                scaler.clip_grad_norm_(optimizer, 0.1)
            elif clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    return [scaler.get_scale(), *(parameter.detach().cpu() for parameter in model.parameters())]


@ranks(2)
def test_accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="no")
    accelerator.scaler = DistributedGradScaler("cpu", init_scale=16.0)
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert optimizer.scaler is accelerator.scaler
    before = model.module.weight.detach().clone()
    skipped = []
    for step in range(3):
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(1, 2)).sum())
        accelerator.clip_grad_norm_(model.parameters(), 100.0)
        if step == 1 and accelerator.process_index == 1:
            model.module.weight.grad.fill_(math.inf)
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
    assert accelerator.scaler.get_scale() == 8.0
    assert torch.allclose(model.module.weight, before - 0.2)
    assert skipped == [False, True, False]


@pytest.mark.gpu
@ranks(2, cuda=True)
def test_two_gpus_skip_together() -> None:
    found = from_all_ranks(train(8, {3: 1, 5: 0}, "cuda"))
    assert found[0] == found[1]
    assert found[0][1] == 2


@pytest.mark.gpu
def test_a_scale_on_the_host_waits_for_gradients_of_a_gpu() -> None:
    weights = [nn.Parameter(torch.zeros(4, device=device)) for device in ("cpu", "cuda")]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    scaler = DistributedGradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    for step in range(1, 4):
        for weight in weights:
            weight.grad = torch.full_like(weight, 3.0)
        if step == 2:
            weights[1].grad[0] = math.inf  # type: ignore[index]
        norm = scaler.clip_grad_norm_(optimizer, 100.0)
        scaler.step(optimizer)
        assert scaler.step_skipped == (step == 2)
        assert math.isfinite(norm) == (step != 2)
        if step != 2:
            assert float(norm) == pytest.approx(3.0 * math.sqrt(8))
        scaler.update(1.0)
    assert all(torch.equal(weight.cpu(), torch.full((4,), -6.0)) for weight in weights)


@pytest.mark.parametrize("method", ["unscale_", "step", "clip_grad_norm_"])
def test_gradients_without_a_scale_are_refused(method: str) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = DistributedGradScaler("cpu")
    parameter.sum().backward()
    arguments = (1.0,) if method == "clip_grad_norm_" else ()
    message = rf"call scaler\.scale\(loss\)\.backward\(\) before {method}\(\)"
    with pytest.raises(AssertionError, match=message):
        getattr(scaler, method)(optimizer, *arguments)
