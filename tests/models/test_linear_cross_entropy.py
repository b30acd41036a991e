from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.memory import EXACT_MALLOC
from distmp.data import IGNORED
from distmp.errors import ConfigError
from distmp.models.linear_cross_entropy import MIN_ROWS, LossHead, linear_cross_entropy
from tests.torchrun import python, run

ROWS = 2 * MIN_ROWS + 37  # three parts, the last one smaller


def case(
    dtype: torch.dtype = torch.float32, rows: int = ROWS, vocabulary: int = 1000
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 24, generator=generator).to(dtype)
    weight = (torch.randn(vocabulary, 24, generator=generator) / 3).to(dtype)
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    targets[::7] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def exact(
    hidden: Tensor, weight: Tensor, targets: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and both gradients of the given values, computed in float64."""
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    loss = plain(wide[0], wide[1], targets)
    (scale * loss).backward()
    return loss, wide[0].grad, wide[1].grad  # type: ignore[return-value]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float32, 1.0),
        (torch.float32, 3.0),
        (torch.bfloat16, 1.0),
        (torch.bfloat16, 2.0**16),
        (torch.bfloat16, 1 / 1500),  # which bfloat16 rounds by 0.14%
        (torch.float16, 2.0**10),
    ],
)
def test_errors_do_not_exceed_those_of_full_logits(dtype: torch.dtype, scale: float) -> None:
    hidden, weight, targets = case(dtype)
    expected = exact(hidden, weight, targets, scale)
    errors = []
    for compute in (plain, linear_cross_entropy):
        hidden.grad = weight.grad = None
        loss = compute(hidden, weight, targets)
        assert (loss.dtype, loss.shape) == (torch.float32, ())
        (scale * loss).backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        assert (hidden.grad.dtype, weight.grad.dtype) == (dtype, dtype)
        found = (loss, hidden.grad, weight.grad)
        errors.append([error(*pair) for pair in zip(found, expected, strict=True)])
    for whole, in_parts in zip(*errors, strict=True):
        # In 16 bits, the product of each part is rounded, and then their sum.
        assert in_parts <= 1.3 * whole + 1e-6


def test_rows_and_targets_may_be_flat() -> None:
    hidden, weight, targets = case(rows=6)
    expected = linear_cross_entropy(hidden, weight, targets)
    batched = hidden.view(2, 3, -1)
    assert torch.equal(linear_cross_entropy(batched, weight, targets), expected)
    assert torch.equal(linear_cross_entropy(hidden, weight, targets.view(2, 3)), expected)
    said = r"targets = 'shape \(3, 2\)': the logits have shape \(2, 3, 1000\); use"
    with pytest.raises(ConfigError, match=said):
        linear_cross_entropy(batched, weight, targets.view(3, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [1000, 1003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gpu_sums_the_gradient_of_the_weight_in_fp32(dtype: torch.dtype, vocabulary: int) -> None:
    hidden, weight, targets = case(dtype, vocabulary=vocabulary)
    expected = exact(hidden, weight, targets, 2.0**10)
    hidden, weight = (each.detach().cuda().requires_grad_() for each in (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, targets.cuda())
    (2.0**10 * loss).backward()
    assert weight.grad is not None
    assert (weight.grad.dtype, weight.grad.shape) == (dtype, weight.shape)
    # The gradient of the logits is rounded once, and the sum of products once.
    limit = max(2 * torch.finfo(dtype).eps, 1e-6)
    for found, right in zip((loss, hidden.grad, weight.grad), expected, strict=True):
        assert error(found.cpu(), right) < limit


def test_small_fp16_gradients_are_exact() -> None:
    """Most gradients of the logits are below the range of FP16 before the loss scale."""
    hidden, weight, targets = case(torch.float16)
    with torch.no_grad():
        weight *= 5
    scale = 2.0**12
    _, expected, _ = exact(hidden, weight, targets, scale)
    (scale * linear_cross_entropy(hidden, weight, targets)).backward()
    assert hidden.grad is not None
    assert error(hidden.grad, expected) < 1e-2


@pytest.mark.parametrize("rows", [2, MIN_ROWS, MIN_ROWS + 1])
def test_any_number_of_rows_and_tokens_is_exact(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distmp.models.linear_cross_entropy.MAX_TOKEN_IDS", 300)
    hidden, weight, targets = case(rows=rows)
    expected = exact(hidden, weight, targets, 1.0)
    loss = linear_cross_entropy(hidden[None], weight, targets[None])
    loss.backward()
    assert hidden.grad is not None
    assert error(loss.detach(), expected[0]) < 1e-6
    assert torch.allclose(hidden.grad.double(), expected[1], atol=1e-6)
    assert weight.grad is not None
    assert torch.allclose(weight.grad.double(), expected[2], atol=1e-5)


def test_autocast_rounds_factors_and_returns_fp32_gradient() -> None:
    hidden, weight, targets = case()
    rounded = [tensor.detach().bfloat16().float().requires_grad_() for tensor in (hidden, weight)]
    expected = exact(*rounded, targets, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    # Not rounded to 16 bits at the end.
    assert (weight.grad != weight.grad.bfloat16()).any()
    assert error(loss.detach(), expected[0]) < 1e-2
    assert error(weight.grad, expected[2]) < 1e-2


def test_mismatched_dtypes_are_refused_like_linear() -> None:
    hidden, weight, targets = case()
    with pytest.raises(RuntimeError, match="dtype"):
        linear_cross_entropy(hidden.bfloat16(), weight, targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_only_required_gradients_are_computed(dtype: torch.dtype) -> None:
    hidden, weight, targets = case(dtype)
    weight.requires_grad_(False)
    linear_cross_entropy(hidden, weight, targets).backward()
    assert weight.grad is None
    assert hidden.grad is not None
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets)
    assert loss.grad_fn is None


def test_only_required_matmuls_are_computed() -> None:
    hidden, weight, targets = case()
    product = 2 * hidden.numel() * len(weight)

    def products() -> float:
        with FlopCounterMode(display=False) as counter:
            loss = linear_cross_entropy(hidden, weight, targets)
            if loss.requires_grad:
                loss.backward()
        return counter.get_total_flops() / product

    assert products() == 3
    weight.requires_grad_(False)
    assert products() == 2
    with torch.no_grad():
        assert products() == 1


def test_gradients_below_fp16_range_are_exact() -> None:
    """The model is sure of every target, so no gradient of a logit is large."""
    hidden, weight, targets = case(torch.float16)
    with torch.no_grad():
        weight /= weight.float().norm(dim=1, keepdim=True).half()
        hidden.copy_(24 * weight[targets.clamp(min=0)])
    scale = 2.0**16
    errors = []
    for compute in (plain, linear_cross_entropy):
        hidden.grad = None
        (scale * compute(hidden, weight, targets)).backward()
        assert hidden.grad is not None
        errors.append(error(hidden.grad, exact(hidden, weight, targets, scale)[1]))
    assert errors[1] <= 1.3 * errors[0] < 0.1


def test_second_backward_is_refused() -> None:
    loss = linear_cross_entropy(*case())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated already"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_second_derivatives_are_refused(dtype: torch.dtype) -> None:
    hidden, weight, targets = case(dtype)
    loss = linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(ConfigError, match="linear_cross_entropy has no second derivatives; use"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_ignored_targets_give_zero_loss_and_gradients() -> None:
    hidden, weight, targets = case()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, IGNORED))
    loss.backward()
    assert loss == 0
    assert hidden.grad is not None
    assert (hidden.grad == 0).all()


def test_infinite_logit_gives_non_finite_loss() -> None:
    hidden, weight, targets = case()
    with torch.no_grad():
        hidden[3] = torch.inf
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert weight.grad is not None
    assert not loss.isfinite()
    assert not weight.grad.isfinite().all()


def test_copied_head_has_own_weight() -> None:
    head = LossHead(24, 1000, bias=False)
    hidden, _, targets = case()
    other = copy.deepcopy(head)
    with torch.no_grad():
        other.weight.zero_()
    other.targets = targets
    counted = int((targets != IGNORED).sum())
    assert other(hidden).item() == pytest.approx(counted * float(torch.tensor(1000.0).log()))
    assert head(hidden).shape == (ROWS, 1000)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_compiled_chunks_have_equal_values(dtype: torch.dtype) -> None:
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(inputs)
        return graph.forward

    head = LossHead(24, 1000, bias=False).to(dtype)
    results = []
    for head.loss_backend in (None, backend):
        for rows in (ROWS, ROWS + 1, ROWS + 2):
            hidden, _, head.targets = case(dtype, rows)
            head.weight.grad = None
            (3 * head(hidden)).backward()
            with torch.no_grad():
                results.append((head(hidden), hidden.grad, head.weight.grad))
    for whole, compiled in zip(results[:3], results[3:], strict=True):
        assert all(map(torch.equal, compiled, whole))
    # With and without a gradient, the first number of rows and any number: not one for each.
    assert 2 <= len(graphs) <= 4


def peak(compute: str, rows: int, vocabulary: int) -> float:
    """Return by how many MiB forward and backward of a loss increase the memory in use."""
    program = f"""
        import torch, torch.nn.functional as F
        from distmp.models.linear_cross_entropy import linear_cross_entropy
        from tests.memory_limit import status
        torch.set_num_threads(1)
        memory = lambda: status("VmHWM") / 1024
        plain = lambda h, w, t: F.cross_entropy(F.linear(h, w).float(), t, reduction="sum")
        def run(rows, vocabulary):
            h, w = torch.randn(rows, 64, requires_grad=True), torch.zeros(vocabulary, 64)
            {compute}(h, w.requires_grad_(), torch.arange(rows)).backward()
        run(16, 64)
        before = memory()
        run({rows}, {vocabulary})
        print(memory() - before - 64 * {vocabulary} * 4 / 2**20)
    """
    lines = [line.removeprefix(" " * 8) for line in program.splitlines()]
    done = run(python("-c", "\n".join(lines)), Path.cwd(), variables=EXACT_MALLOC)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.nightly
def test_loss_memory_is_small_part_of_logits() -> None:
    """At a vocabulary of 32k, also with the gradient of the weight counted in."""
    rows, vocabulary = 512, 2**15
    assert 8 * peak("linear_cross_entropy", rows * 4, vocabulary) < 4 * peak(
        "plain", rows, vocabulary
    )
