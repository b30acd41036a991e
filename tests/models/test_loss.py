from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from distmp.data import IGNORED
from distmp.engine.engine import Engine
from distmp.errors import ConfigError
from distmp.models.linear_cross_entropy import _compute_chunk
from distmp.models.loss import logits_of, next_token_loss, takes_targets
from distmp.models.transformer import Transformer, TransformerConfig
from distmp.parallel import ParallelConfig
from distmp.parallel.blocks import prepare_blocks
from tests.ranks import ranks
from tests.reference import weights


class Constant(nn.Module):
    """Returns the same logits for any input."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.shape == self.logits.shape[:2]
        return self.logits


def batch(targets: Tensor) -> dict[str, Tensor]:
    return {"inputs": torch.zeros_like(targets), "targets": targets}


def test_inputs_that_are_no_token_ids_are_refused() -> None:
    samples = {"inputs": torch.zeros(2, 3), "targets": torch.zeros(2, 3, dtype=torch.int64)}
    with pytest.raises(ConfigError, match=r"inputs are token ids, int64; set model\.loss to a"):
        next_token_loss(Constant(torch.zeros(2, 3, 4)), samples)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loss_sums_over_counted_targets(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(3, 40, 7, generator=generator)).to(dtype)
    targets = torch.randint(7, (3, 40), generator=generator)
    targets[1, 5:30] = IGNORED
    loss, weight = next_token_loss(Constant(logits), batch(targets))
    probabilities = torch.softmax(logits.double(), -1)
    expected = sum(
        -probabilities[i, j, targets[i, j]].log().item()
        for i in range(3)
        for j in range(40)
        if targets[i, j] != IGNORED
    )
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert weight.item() == 95
    assert loss.dtype == weight.dtype == torch.float32
    assert loss.shape == weight.shape == ()


def test_ignored_batch_has_zero_loss_weight_and_gradient() -> None:
    logits = torch.randn(2, 4, 7, requires_grad=True)
    loss, weight = next_token_loss(Constant(logits), batch(torch.full((2, 4), IGNORED)))
    loss.backward()
    assert (loss.item(), weight.item()) == (0.0, 0.0)
    assert logits.grad is not None
    assert not logits.grad.any()


def test_batch_with_missing_keys_is_described() -> None:
    model = Constant(torch.zeros(1, 1, 7))
    for wrong in ({"inputs": torch.zeros(4, 3)}, [torch.zeros(4, 3)], torch.zeros(4, 3)):
        with pytest.raises(ConfigError, match=r"float32 .* the loss next_token reads the keys"):
            next_token_loss(model, wrong)


class Outside(nn.Module):
    """Hides that a model computes its loss itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return logits_of(self.model(tokens))


def small(*, tied: bool = True) -> Transformer:
    torch.manual_seed(0)
    return Transformer(TransformerConfig(50, 16, 2, 16, 2, 32, tied_head=tied))


def tokens(rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(50, (rows, 17), generator=generator)
    targets = drawn[:, 1:].clone()
    targets[0, :9] = IGNORED
    return {"inputs": drawn[:, :-1], "targets": targets}


@pytest.mark.parametrize("tied", [True, False])
def test_loss_computed_by_model_agrees_with_logits(tied: bool) -> None:
    own, outside = small(tied=tied), Outside(small(tied=tied))
    assert takes_targets(own)
    results = []
    for model, loss_of in ((own, next_token_loss), (outside, plain)):
        loss, weight = loss_of(model, tokens())
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append((loss.detach(), weight, gradients))
    (loss, weight, gradients), (expected, same_weight, others) = results
    assert torch.allclose(loss, expected, rtol=1e-6)
    assert weight == same_weight
    for found, other in zip(gradients, others, strict=True):
        assert found is not None
        assert other is not None
        assert torch.allclose(found, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_compiled_blocks_compile_loss(tied: bool) -> None:
    model, expected = small(tied=tied), small(tied=tied)
    graphs: list[set[str]] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward

    prepare_blocks(model, ParallelConfig(compile="blocks"), backend=backend)  # type: ignore[arg-type]
    losses = [next_token_loss(part, tokens())[0] for part in (model, expected)]
    # Compiled, heads are rotated by other operators.
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    for found, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.grad, other.grad, rtol=1e-4, atol=1e-5)
    # The softmax, the loss and the gradient of the logits are one graph, the blocks another one.
    assert sum({"exp_", "scatter_add_"} <= targets for targets in graphs) == 1
    assert len(graphs) <= 3


def plain(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits = model(batch["inputs"]).float().flatten(0, -2)
    targets = batch["targets"].flatten()
    loss = nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return loss, (targets != IGNORED).sum().float()


def adamw(named: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)  # type: ignore[arg-type]


def trained(policy: str, strategy: str, loss_of: object, *, tied: bool) -> dict[str, Tensor]:
    engine = Engine(small(tied=tied), loss_of, adamw, policy=policy, strategy=strategy)  # type: ignore[arg-type]
    for _ in range(2):
        assert not engine.step([tokens(2), tokens(2)]).numbers.skipped
    return weights(engine)


@ranks(2)
def test_loss_inside_works_with_strategies_and_policies() -> None:
    for strategy, policy, tied in (
        ("ddp", "bf16", True),
        ("ddp", "bf16-autocast", False),
        ("ddp", "bf16,keep_fp32=head", False),
        ("fsdp", "fp32", True),
        ("fsdp", "bf16", False),
        ("fsdp", "bf16,keep_fp32=norm|head", False),
        ("fsdp", "bf16,output=bf16", True),
    ):
        found = trained(policy, strategy, next_token_loss, tied=tied)
        expected = trained(policy, strategy, plain, tied=tied)
        for name, value in found.items():
            # Adam's steps have the size of the learning rate whatever the gradient.
            close = (value - expected[name]).abs() < 2e-3
            assert close.float().mean() > 0.95, (strategy, policy, name)


def test_policy_that_rounds_outputs_computes_loss_outside() -> None:
    engine = Engine(small(), next_token_loss, adamw, policy="bf16,output=bf16", strategy="single")
    assert not takes_targets(engine.module)
    loss, _ = next_token_loss(engine.module, tokens())
    assert loss.dtype == torch.float32


def test_wrapped_model_still_computes_its_loss() -> None:
    wrapped: Any = checkpoint_wrapper(torch.compile(small(), backend="eager"))
    ids = torch.randint(50, (2, 9))
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    for model in (wrapped, nn.DataParallel(small()), small()):
        assert takes_targets(model)
    assert not takes_targets(checkpoint_wrapper(nn.Linear(2, 2)))
    found, _ = next_token_loss(wrapped, batch)
    assert float(found) == pytest.approx(float(next_token_loss(small(), batch)[0]), rel=1e-5)


class Composed(nn.Module):
    """A model whose first part could compute a loss, and whose forward returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.scale = small(), nn.Linear(50, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scale(self.backbone(tokens))  # type: ignore[no-any-return]


def test_submodule_does_not_take_targets_of_model() -> None:
    model = Composed()
    assert not takes_targets(model)
    assert torch.equal(next_token_loss(model, tokens())[0], plain(model, tokens())[0])
    outside = Outside(small())
    assert torch.equal(next_token_loss(outside, tokens())[0], plain(outside, tokens())[0])


class Inherits(Transformer):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) * 0.25


class Delegates(Outside):
    def __getattr__(self, name: str) -> Any:
        return getattr(self._modules["model"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._modules["model"](*args, **kwargs) * 0.25  # type: ignore[misc]


@pytest.mark.parametrize("build", [Inherits, lambda config: Delegates(Transformer(config))])
def test_forward_that_changes_logits_does_not_take_targets(build: Any) -> None:
    torch.manual_seed(0)
    model = build(TransformerConfig(50, 16, 2, 16, 2, 32))
    engine = Engine(model, next_token_loss, adamw, policy="fp32", strategy="single")
    expected = plain(model, tokens())[0] / plain(model, tokens())[1]
    for _ in range(2):
        assert engine.evaluate([tokens()]) == pytest.approx(float(expected), rel=1e-6)
        engine.evaluate_metrics([tokens()], {"mean": lambda logits, _: (logits.mean(), 1)})


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize("target", [-1, -7, 50, 99_999])
def test_targets_outside_vocabulary_are_refused(takes: bool, target: int) -> None:
    model = Transformer(TransformerConfig(50, 16, 1, 16, 2, 32))
    model.takes_targets = takes
    targets = torch.tensor([[3, IGNORED, target, 3]])
    said = rf"targets from {min(0, target)} to {max(3, target)}': the model returns logits of 50 "
    with pytest.raises(ConfigError, match=said):
        next_token_loss(model, batch(targets))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda logits: logits.transpose(0, 1), r"\(2, 3\)': the logits have shape \(3, 2, 5\)"),
        (lambda logits: logits[:, 1:], r"\(2, 3\)': the logits have shape \(2, 2, 5\); use"),
        (lambda logits: (logits,), "'tuple': the model returned this; return logits"),
    ],
)
def test_outputs_that_are_no_logits_of_the_targets_are_refused(changed: Any, said: str) -> None:
    class Changed(nn.Embedding):
        def forward(self, inputs: Tensor) -> Any:
            return changed(super().forward(inputs))

    with pytest.raises(ConfigError, match=said):
        next_token_loss(Changed(5, 5), batch(torch.randint(5, (2, 3))))


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize("times", [(6, 7), (7, 6)])
def test_targets_of_another_shape_than_inputs_are_refused(
    takes: bool, times: tuple[int, int]
) -> None:
    model = Transformer(TransformerConfig(50, 16, 1, 16, 2, 32))
    model.takes_targets = takes
    inputs, targets = (torch.zeros(2, time, dtype=torch.int64) for time in times)
    with pytest.raises(ConfigError, match=rf"targets = 'shape \(2, {times[1]}\)': the logits"):
        next_token_loss(model, {"inputs": inputs, "targets": targets})


def test_targets_of_another_type_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"targets: int32 \[2, 3\]}': targets are int64"):
        next_token_loss(nn.Embedding(5, 5), batch(torch.ones(2, 3, dtype=torch.int32)))


def test_negative_target_raises_out_of_bounds() -> None:
    """Where targets are not checked: on a GPU, and below torch.compile."""
    hidden, weight, targets = torch.randn(4, 8), torch.randn(50, 8), torch.tensor([3, -7, 4, 5])
    with pytest.raises(RuntimeError, match="-7 is out of bounds"):
        _compute_chunk(hidden, weight, 50, targets, None)


class Halved(nn.Module):
    """Changes the logits of a model that would compute its loss itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens) / 2


def test_module_around_a_model_computes_its_logits() -> None:
    config = TransformerConfig(11, 8, 1, 8, 2, 8)
    model = Transformer(config)
    ids = torch.randint(11, (2, 9))
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    logits = model(batch["inputs"])
    for module, expected in ((Halved(model), logits / 2), (nn.Sequential(model), logits)):
        found, _ = next_token_loss(module, batch)
        wanted = nn.functional.cross_entropy(
            expected.flatten(0, 1).double(), batch["targets"].flatten(), reduction="sum"
        )
        assert float(found) == pytest.approx(float(wanted), rel=1e-5)
