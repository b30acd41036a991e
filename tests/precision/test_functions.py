"""Functions in FP32 on 16-bit tensors, compared with float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.autocast_mode import custom_bwd, custom_fwd
from torch.utils.checkpoint import checkpoint

import distmp
from distmp.errors import ConfigError
from distmp.parallel.settings import ParallelConfig
from distmp.precision.functions import functions_in_fp32
from tests.ranks import in_turn, ranks
from tests.reference import fused_adamw, make_engine, sum_of_squares

PAGE = Path(__file__).parents[2] / "docs" / "precision.md"
X = torch.randn(64, 2048, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(64)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "cumsum": lambda x: x.abs().cumsum(-1),
    "sum": lambda x: x.abs().sum(-1),
    "mean": lambda x: x.abs().mean(-1),
    "var": lambda x: x.var(-1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "layer_norm": lambda x: F.layer_norm(x, (2048,)),
    "rms_norm": lambda x: F.rms_norm(x, (2048,)),
    "cross_entropy": lambda x: F.cross_entropy(x, CLASSES, reduction="none"),
    "prod": lambda x: (1 + x / 64).to(x.dtype).prod(-1),
}


def error(function: Callable[[Tensor], Tensor], dtype: torch.dtype, *names: str) -> float:
    """Return the relative error, in units of the rounding of the result."""
    x = X.to(dtype)
    exact = function_in_fp64(function, x)
    with functions_in_fp32(names):
        found = function(x)
    rounded = (exact.to(dtype).double() - exact).norm()
    return float((found.double() - exact).norm() / rounded)


def function_in_fp64(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if function is FUNCTIONS["prod"]:  # of the same rounded factors
        return (1 + x / 64).to(x.dtype).double().prod(-1)
    return function(x.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_page_lists_functions_summing_in_16_bits(dtype: torch.dtype) -> None:
    errors = {name: error(function, dtype) for name, function in FUNCTIONS.items()}
    assert {name for name, found in errors.items() if found > 2} == {"prod"}, errors
    for name in FUNCTIONS:
        assert f"`{name}`" in PAGE.read_text().partition("## Functions in FP32")[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kept_function_rounds_only_its_result(dtype: torch.dtype) -> None:
    assert error(FUNCTIONS["prod"], dtype, "prod") < 1.1


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("relu", lambda x: F.relu(x, inplace=True)),
        ("dropout", lambda x: F.dropout(x, 0.5, True, True)),
        ("exp", lambda x: torch.exp(x, out=x)),
        ("view", lambda x: x.view(-1)),
        ("chunk", lambda x: x.chunk(2)[0]),
    ],
)
def test_writes_lost_in_a_copy_are_refused(name: str, function: Callable[[Tensor], Tensor]) -> None:
    x = X[:2, :4].bfloat16()
    with functions_in_fp32([name]), pytest.raises(ConfigError, match="its argument"):
        function(x)
    with functions_in_fp32([name]), torch.inference_mode():
        F.dropout(x.clone(), 0.5, False)  # returns its argument, and writes nothing


def test_special_functions_follow_common_names() -> None:
    with functions_in_fp32(["logsumexp"]):
        number = torch.special.logsumexp(X[0].bfloat16(), 0)
    assert number.dtype == torch.float32, "numbers are not rounded"


def statistics(x: Tensor) -> Tensor:
    """Return mean and variance, in FP32 for 16 bits."""
    return torch.ones(2, 4, dtype=torch.promote_types(x.dtype, torch.float32))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("softmax", lambda x: F.softmax(x, -1, dtype=torch.float32)),
        ("softmax", lambda x: x.softmax(-1, torch.float32)),
        ("sum", lambda x: x.sum(1, dtype=torch.float32)),
        ("sum", lambda x: x.sum(1, dtype=torch.float64)),
        ("mse_loss", lambda x: F.mse_loss(x.float() + 1, x, reduction="none")),
        ("mul", lambda x: torch.mul(x, torch.tensor(3.0))),
        ("mul", lambda x: torch.mul(x, torch.ones(4))),
        ("add", lambda x: torch.add(x, torch.ones(4, dtype=torch.float16))),
        ("batch_norm", lambda x: F.batch_norm(x, *statistics(x))),
        ("softmax", lambda x: x.softmax(-1)),
    ],
)
def test_results_have_the_dtype_of_torch(name: str, function: Callable[[Tensor], Tensor]) -> None:
    x = X[:2, :4].bfloat16()
    with functions_in_fp32([name]):
        found = function(x)
    assert found.dtype == function(x).dtype
    assert found.double().allclose(function(x.double()).double(), rtol=2.0**-8)


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 512)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        factors = 1 + self.first(x) / 64
        return self.last(factors.view(-1, 8, 64).prod(-1))


def trained(policy: str, strategy: str) -> tuple[float, list[Tensor]]:
    torch.manual_seed(0)
    seen: list[Tensor] = []

    def loss(model: nn.Module, x: Tensor) -> Any:
        return F.mse_loss(model(x).to(torch.float16), x.to(torch.float16), reduction="sum"), len(x)

    engine = make_engine(model=Products(), loss=loss, policy=policy, strategy=strategy)
    engine.module.last.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    numbers = engine.step([torch.ones(8, 8) * 100]).numbers
    return numbers.loss, seen


@ranks(2)
@in_turn("strategy", ["ddp", "fsdp"])
def test_policies_select_functions_by_name(strategy: str) -> None:
    exact = trained("fp32", strategy)[1][0]
    _, plain = trained("bf16", strategy)
    loss, kept = trained("bf16,keep_fp32=prod()|mse_loss()", strategy)
    assert kept[0].dtype == torch.bfloat16, "the next layer takes the result"
    assert (kept[0] - exact).norm() < (plain[0] - exact).norm()
    # The sum is beyond float16, in which the loss function passes its tensors.
    assert 65504 < loss < float("inf")
    assert trained("bf16", strategy)[0] == float("inf")


def test_unsupported_function_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"keep_fp32 = 'prodd\(\)': did you mean 'prod\(\)'"):
        functions_in_fp32(["prodd"])
    with pytest.raises(ConfigError, match="writes to its argument"):
        functions_in_fp32(["relu_"])
    with pytest.raises(ConfigError, match="autocast selects the functions"):
        distmp.policy("bf16-autocast,keep_fp32=prod()")
    with pytest.raises(ConfigError, match="compiled or recomputed"):
        distmp.Engine(
            Products(),
            lambda model, x: (model(x).sum(), 1),
            fused_adamw,
            policy="bf16,keep_fp32=prod()",
            parallel=ParallelConfig(activation_checkpointing="blocks"),
        )


class Recomputed(nn.Module):
    """Checkpoints a product: in the forward itself, or in a module that can be kept."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.product = Product()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return checkpoint(self.product, hidden, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.prod(1 + x / 8, -1)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_kept_function_that_backward_recomputes_is_refused(use_reentrant: bool) -> None:
    def engine_of(policy: str) -> distmp.Engine:
        return make_engine(model=Recomputed(use_reentrant), loss=sum_of_squares, policy=policy)

    with pytest.raises(ConfigError, match=r"'prod\(\)': is called in torch\.utils\.checkpoint"):
        engine_of("bf16,keep_fp32=prod()").step([torch.ones(4, 8)])
    # Other functions may be kept, and so may the module.
    for kept in ("mse_loss()", "product"):
        assert engine_of(f"bf16,keep_fp32={kept}").step([torch.ones(4, 8)]).numbers.loss > 0


class Cubed(torch.autograd.Function):
    """A user's function, which autocast would call with FP32 inputs."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        assert not torch.is_autocast_enabled("cpu")
        return x**3

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


class Cubing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return Cubed.apply(x)


seen: list[torch.dtype] = []


@pytest.mark.parametrize(
    "policy", ["bf16,keep_fp32=Cubing", "bf16-autocast", "fp16,keep_fp32=Cubing"]
)
def test_custom_fwd_function_gets_fp32_in_kept_module(policy: str) -> None:
    seen.clear()
    model = nn.Sequential(nn.Linear(8, 8), Cubing(), nn.Linear(8, 8))
    engine = make_engine(model=model, loss=sum_of_squares, policy=policy)
    engine.step([torch.ones(4, 8)])
    assert set(seen) == {torch.bfloat16 if policy == "bf16-autocast" else torch.float32}
