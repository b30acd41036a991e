"""Mistakes in the arguments of a step and the results of the loss function."""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.data import DataLoader as TorchDataLoader

from distmp.data.dataloader import DataLoader
from distmp.data.evaluation import ForwardOnly
from distmp.engine.engine import Engine
from distmp.engine.setup import EngineSetup
from distmp.errors import ConfigError, DistmpError, LostPeerError, SetupError, TrainingError
from distmp.parallel import ParallelConfig
from distmp.parallel.settings import ShardingConfig
from tests.ranks import in_turn, ranks

Pair = tuple[Tensor, Tensor]


def pair(samples: int = 4) -> Pair:
    return torch.randn(samples, 3), torch.randint(2, (samples,))


def summed(model: nn.Module, batch: Pair) -> tuple[Tensor, float]:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="sum"), len(targets)


def make(
    loss: Callable[..., Any] = summed, model: nn.Module | None = None, **options: Any
) -> Engine:
    options.setdefault("policy", "fp32")
    return Engine(
        model or nn.Linear(3, 2), loss, lambda named: torch.optim.SGD(named, lr=0.1), **options
    )


# Arguments of a step


@pytest.mark.parametrize(
    ("microbatches", "message"),
    [
        (torch.zeros(4, 3), r"'Tensor of shape \(4, 3\) and float32': is one batch; pass a list"),
        ({"x": torch.zeros(4, 3)}, r"'dict': is one batch; pass a list of microbatches"),
        (pair(), r"'\(Tensor of shape \(4, 3\).*looks like one batch, such as \(inputs, targets\)"),
        ([*pair()], r"looks like one batch, such as \(inputs, targets\); pass a list"),
        ((torch.zeros(4), torch.zeros(4)), "looks like one batch"),
        ((p for p in [pair()]), r"'generator': has no length; pass a list, or the number"),
        ({1, 2}, "'set': has no length; pass a list"),
        (3, "'int': has no length; pass a list"),
        (TorchDataLoader([pair()]), "'DataLoader': gives all batches of an epoch, not the microb"),
        (iter(TorchDataLoader([pair()])), "gives all batches of an epoch"),
        (DataLoader([pair()] * 2, 2, 1), "gives all batches of an epoch"),
        ([], "is empty; a step needs at least one microbatch"),
        ([pair(), ForwardOnly(pair())], r"'loader.once\(\)': is for engine.evaluate"),
    ],
)
def test_invalid_microbatches_are_refused(microbatches: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=r"microbatches = .*" + message):
        make().step(microbatches)


@pytest.mark.parametrize("count", [2.0, -2, 0, True])
def test_count_that_is_no_positive_integer_is_refused(count: Any) -> None:
    message = rf"count = {count}: use an integer of 1 or more, the number of microb"
    with pytest.raises(ConfigError, match=message):
        make().step(iter([pair(), pair()]), count=count)


def test_microbatches_that_overwrite_each_other_are_refused() -> None:
    buffer, targets = pair()

    def read(*, copies: bool) -> Iterator[Pair]:
        for _ in range(2):
            buffer.normal_()
            yield (buffer.clone() if copies else buffer), targets

    engine = make()
    engine.step(read(copies=True), count=2)
    with pytest.raises(ConfigError, match="'generator': has overwritten a microbatch"):
        engine.step(read(copies=False), count=2)


def test_tuples_and_lists_of_batches_are_taken() -> None:
    engine = make()
    assert engine.step((pair(), pair())).numbers.weight == 8
    assert engine.step([pair()]).numbers.weight == 4


# Results of the loss function


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda loss, n: loss, r"loss = 'Tensor of shape \(\) and float32': the loss function ret"),
        (lambda loss, n: {"loss": loss}, r"loss = 'dict': the loss function returned this"),
        (lambda loss, n: (loss, n, 1), r"loss = 'tuple of 3': the loss function returned this"),
        (lambda loss, n: (loss.item(), n), r"loss = 'float': is not a tensor of one float"),
        (lambda loss, n: (loss.detach(), n), "does not depend on any parameter"),
        (lambda loss, n: (loss.expand(3), n), r"shape \(3,\).*return the sum, loss.sum\(\)"),
        (lambda loss, n: (loss, None), r"weight = 'NoneType': is not one number"),
        (lambda loss, n: (loss, torch.ones(n)), r"weight = 'Tensor of shape \(4,\).*not one numb"),
        (lambda loss, n: (loss, -1), r"weight = -1.0: is below 0"),
        (lambda loss, n: (loss, torch.tensor(-2.0)), r"weight = -2.0: is below 0"),
    ],
)
def test_invalid_loss_and_weight_are_refused(returned: Any, message: str) -> None:
    def loss(model: nn.Module, batch: Pair) -> Any:
        return returned(*summed(model, batch))

    with pytest.raises(ConfigError, match=message):
        make(loss).step([pair()])


@pytest.mark.filterwarnings("ignore:the loss depends on parameters outside of the model")
@pytest.mark.parametrize("checks", [True, False])
def test_a_loss_of_another_module_is_refused_until_the_model_has_a_gradient(checks: bool) -> None:
    other = nn.Linear(3, 2)
    uses_other = True

    def loss(model: nn.Module, batch: Pair) -> tuple[Tensor, float]:
        return summed(other if uses_other else model, batch)

    engine = make(loss, first_step_checks=checks)
    for _ in range(2):
        with pytest.raises(ConfigError, match="gives none of the 2 trained parameters a gradient"):
            engine.step([pair()])
    uses_other = False
    assert not engine.step([pair()]).numbers.skipped
    uses_other = True
    engine.step([pair()])  # such as a loss of an unused part, after it is known that others work


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_loss_function_and_model_are_checked_before_the_first_step() -> None:
    with pytest.raises(ConfigError, match=r"too many positional.*pass a function loss\(module, b"):
        make(lambda model: summed(model, pair()))
    with pytest.raises(ConfigError, match="is scripted and takes no hooks; pass the plain module"):
        make(model=torch.jit.script(nn.Linear(3, 2)))
    with pytest.raises(ConfigError, match=r"model = 'NoneType': is not a torch\.nn\.Module"):
        Engine(lambda: None, summed, lambda named: torch.optim.SGD(named))  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match=r"config = 'dict': is not a distmp\.EngineConfig"):
        make(config={"policy": "fp32"})


@pytest.mark.parametrize("weight", [4, 4.0, torch.tensor(4), torch.tensor([4.0])])
def test_weights_of_any_kind_are_taken(weight: Any) -> None:
    def loss(model: nn.Module, batch: Pair) -> Any:
        return summed(model, batch)[0].reshape(1), weight

    assert make(loss).step([pair()]).numbers.weight == 4


# Likely mistakes

MEAN = "the loss looks like a mean"


def mean_loss(model: nn.Module, batch: Pair) -> tuple[Tensor, float]:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets), len(targets)


def divided(model: nn.Module, batch: Pair) -> tuple[Tensor, float]:
    total, weight = summed(model, batch)
    return 0.3 * total / weight + 0.1, weight


def mean_with_weight_one(model: nn.Module, batch: Pair) -> tuple[Tensor, float]:
    return mean_loss(model, batch)[0], 1


def smoothed(model: nn.Module, batch: Pair) -> tuple[Tensor, float]:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, label_smoothing=0.1), len(targets)


def doubled(model: nn.Module, batch: Pair) -> tuple[Tensor, float]:
    loss, weight = mean_loss(model, batch)
    return 2 * loss, weight


def weighted(model: nn.Module, batch: Pair) -> tuple[Tensor, float]:
    loss, weight = mean_loss(model, batch)
    return 0.5 * loss * torch.tensor(weight) + 0.01 * model(batch[0]).square().mean(), weight


def contrastive(model: nn.Module, batch: Pair) -> tuple[Tensor, float]:
    features = F.normalize(model(batch[0]), dim=1)
    similar = features @ features.T
    labels = torch.arange(len(features))
    return F.cross_entropy(similar, labels, reduction="sum"), len(features)


@pytest.mark.parametrize(
    ("loss", "samples", "warned"),
    [
        (mean_loss, 2, True),
        (mean_loss, 7, True),
        (divided, 16, True),
        (smoothed, 16, True),
        (doubled, 16, True),
        (weighted, 16, False),
        (mean_loss, 1, False),  # cannot be told from a sum
        (summed, 2, False),
        (summed, 16, False),
        (mean_with_weight_one, 16, False),
        (contrastive, 8, False),
    ],
)
def test_a_mean_is_distinguished_from_a_sum(
    loss: Any, samples: int, warned: bool, recwarn: pytest.WarningsRecorder
) -> None:
    engine = make(loss)
    for _ in range(3):
        engine.step([pair(samples)])
    assert sum(MEAN in str(warning.message) for warning in recwarn) == warned


def test_a_mean_is_warned_of_once_for_microbatches_of_several_weights(
    recwarn: pytest.WarningsRecorder,
) -> None:
    make(mean_loss).step([pair(samples) for samples in (3, 4, 5)])
    assert sum(MEAN in str(warning.message) for warning in recwarn) == 1


def test_the_loss_is_called_once_for_each_microbatch() -> None:
    batches: list[Any] = []

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        batches.append(batch)
        return model(batch).square().sum(), len(batch)

    microbatches = [torch.randn(6, 3) for _ in range(2)]
    make(loss).step(microbatches)
    assert list(map(id, batches)) == list(map(id, microbatches))


@pytest.mark.parametrize(("samples", "warned"), [(2, False), (5, True)])
def test_a_list_of_inputs_and_targets_is_warned_of(
    samples: int, warned: bool, recwarn: pytest.WarningsRecorder
) -> None:
    """torch's loader yields the list [inputs, targets]; rows of the inputs would be targets."""

    def next_token(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), batch[1].numel()

    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    inputs, targets = torch.randint(9, (2, samples, 6))
    make(next_token, model).step([inputs, targets])
    assert sum("is that of one row" in str(w.message) for w in recwarn) == warned


def test_microbatches_that_are_tensors_are_not_warned_of(
    recwarn: pytest.WarningsRecorder,
) -> None:
    def mean_of_rows(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return model(batch).square().mean(), 1

    make(mean_of_rows).step([torch.randn(5, 3), torch.randn(5, 3)])
    assert not recwarn


class Classifier(nn.Module):
    """A new head on an encoder, like that of `from_pretrained`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Any:
        return self.head(self.encoder(inputs))


def frozen_norm() -> nn.Module:
    model = Classifier()
    model.encoder[1].eval()
    return model


def frozen_encoder() -> nn.Module:
    model = Classifier()
    model.encoder.eval().requires_grad_(False)
    return model


def untrained_encoder() -> nn.Module:
    model = Classifier()
    model.encoder.eval()
    return model


def lone_dropout(probability: float = 0.5) -> nn.Module:
    model = Classifier()
    model.encoder[2] = nn.Dropout(probability).eval()
    return model


def two_dropouts() -> nn.Module:
    model = lone_dropout()
    model.encoder.append(nn.Dropout(0.1).eval())
    return model


class Recurrent(nn.Module):
    """A recurrent encoder that is in evaluation mode, and a head that is trained."""

    def __init__(self, dropout: float, *, frozen: bool = False) -> None:
        super().__init__()
        self.encoder = nn.GRU(3, 4, num_layers=2, dropout=dropout).eval()
        self.encoder.requires_grad_(not frozen)
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Any:
        return self.head(self.encoder(inputs)[0])


@pytest.mark.parametrize(
    ("model", "part"),
    [
        (Classifier, None),
        (frozen_norm, None),
        (lone_dropout, "'encoder.2' (Dropout)"),
        (two_dropouts, "'encoder.2' (Dropout), 'encoder.3' (Dropout)"),
        (lambda: lone_dropout(0.0), None),
        (lambda: Recurrent(0.5), "'encoder' (GRU)"),
        (lambda: Recurrent(0.0), None),
        (lambda: Recurrent(0.5, frozen=True), None),
        (frozen_encoder, None),
        (lambda: Classifier().eval(), "the model"),
        (lambda: nn.Linear(3, 2).eval(), "the model"),
        (untrained_encoder, "'encoder' (Sequential)"),
    ],
)
def test_training_in_evaluation_mode_is_warned_of_once(
    model: Callable[[], nn.Module], part: str | None, recwarn: pytest.WarningsRecorder
) -> None:
    engine = make(model=model())
    modes = [module.training for module in engine.module.modules()]
    for _ in range(3):
        engine.step([pair(6)])
        engine.evaluate([pair(6)])
    messages = [str(warning.message) for warning in recwarn]
    assert len(messages) == (part is not None)
    for message in messages:
        assert message.startswith(f"trained in evaluation mode: {part} (as from_pretrained")
    assert [module.training for module in engine.module.modules()] == modes


def test_a_model_that_is_left_in_evaluation_mode_is_warned_of_once(
    recwarn: pytest.WarningsRecorder,
) -> None:
    engine = make(model=Classifier())
    engine.step([pair(6)])
    engine.evaluate([pair(6)])
    engine.step([pair(6)])
    assert not recwarn
    engine.module.encoder.eval()
    for _ in range(3):
        engine.step([pair(6)])
    assert len(recwarn) == 1
    assert recwarn[0].filename == __file__
    quiet = make(model=Classifier().eval(), first_step_checks=False)
    quiet.step([pair(6)])
    assert len(recwarn) == 1


@ranks(2)
@in_turn("part", ["", ".encoder.2"])
def test_modes_that_differ_between_ranks_are_refused(part: str) -> None:
    engine = make(model=Classifier(), strategy="ddp", first_step_checks=False)
    engine.step([pair(6)])
    if dist.get_rank() == 1:
        engine.model.get_submodule(part.removeprefix(".")).eval()
    name = part.removeprefix(".")
    with pytest.raises(ConfigError, match=rf"modules in evaluation mode = .*{name}.* on rank 1"):
        engine.step([pair(6)])
    engine.model.train()
    engine.step([pair(6)])


class Growing(nn.Linear):
    """Has a table of positions that grows with its input."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("table", torch.ones(2, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) > len(self.table):
            self.table = torch.ones(len(inputs), 1)
        return super().forward(inputs) * self.table[: len(inputs)]


def test_a_buffer_may_grow_in_forward() -> None:
    torch.manual_seed(0)
    engine, plain = make(model=Growing()), nn.Linear(3, 2)
    plain.load_state_dict(engine.model.state_dict(), strict=False)
    for samples in (2, 5, 9, 4):
        batch = pair(samples)
        engine.step([batch])
        gradients = torch.autograd.grad(F.cross_entropy(plain(batch[0]), batch[1]), plain.weight)
        with torch.no_grad():
            plain.weight -= 0.1 * gradients[0]
            plain.bias.copy_(engine.model.bias)
    torch.testing.assert_close(engine.model.weight, plain.weight)
    assert len(engine.model.table) == 9


@ranks(2)
def test_buffers_that_grow_differently_on_ranks_are_refused() -> None:
    engine = make(model=Growing(), strategy="ddp", first_step_checks=False)
    engine.step([pair(5)])
    sent, broadcast = [], dist.broadcast

    def record(tensor: Tensor, *arguments: Any) -> None:
        sent.append(tensor.numel())
        broadcast(tensor, *arguments)

    dist.broadcast = record  # type: ignore[assignment]
    message = r"buffers\[0\] = table \(6, 1\) float32 on rank 0; table \(7, 1\) float32 on rank 1"
    with pytest.raises(ConfigError, match=message):
        engine.step([pair(6 + dist.get_rank())])
    assert sent == [5]  # as many on both ranks, so that none of them hangs
    # Rank 1 alone has a larger table since then.
    engine.model.table = torch.ones(6 + dist.get_rank(), 1)
    with pytest.raises(ConfigError, match=message):
        engine.save(Path("saved"))
    assert sent == [5]
    dist.broadcast = broadcast
    engine.model.table = torch.ones(7, 1)
    engine.step([pair(4)])


@pytest.mark.parametrize("name", ["weight", "table"])
def test_tensors_whose_elements_share_memory_are_refused(name: str) -> None:
    model = Growing()
    repeated = torch.ones(2, 1).expand(2, 3)
    setattr(model, name, nn.Parameter(repeated) if name == "weight" else repeated)
    with pytest.raises(ConfigError, match=f"model = '{name}': has several elements in one place"):
        make(model=model)


@ranks(2)
def test_the_same_data_on_all_ranks_is_warned_of() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        make(strategy="ddp").step([pair()])
        texts = [str(entry.message) for entry in found]
        found.clear()
        torch.manual_seed(dist.get_rank())
        make(strategy="ddp").step([pair()])
        assert not found
        make(mean_loss, strategy="fsdp").step([pair()])
    assert sum(MEAN in str(entry.message) for entry in found) == (dist.get_rank() == 0)
    assert len(texts) == (dist.get_rank() == 0)
    assert all(text.startswith("all 2 ranks were given the same first") for text in texts)


class WithLoss(nn.Linear):
    """Returns its own loss, in its compute dtype."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(inputs), targets, reduction="sum")


@pytest.mark.parametrize(
    ("policy", "warned"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("bf16-autocast", None), ("fp32", None)],
)
def test_a_loss_that_is_computed_in_16_bits_is_warned_of(
    policy: str, warned: str | None, recwarn: pytest.WarningsRecorder
) -> None:
    def own(model: nn.Module, batch: Pair) -> tuple[Tensor, float]:
        return 1.0 * model(*batch).float(), len(batch[0])

    engine = make(own, WithLoss(3, 2), policy=policy)
    for _ in range(2):
        engine.step([pair()])
    outside = make(policy=policy)
    outside.step([pair()])
    found = [str(warning.message) for warning in recwarn]
    assert len(found) == (warned is not None)
    assert all(text.startswith(f"the loss is computed in {warned}, too coarse") for text in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64])
def test_a_weight_that_is_counted_in_16_bits_is_warned_of(
    dtype: torch.dtype, recwarn: pytest.WarningsRecorder
) -> None:
    engine = make(lambda model, batch: (summed(model, batch)[0], torch.tensor(4, dtype=dtype)))
    for _ in range(2):
        engine.step([pair()])
    name = str(dtype).removeprefix("torch.")
    expected = [f"the weight is counted in {name}, which rounds"] * (dtype.itemsize == 2)
    assert [str(found.message).partition(" large")[0] for found in recwarn] == expected


def test_parameters_outside_of_the_model_are_warned_of(
    recwarn: pytest.WarningsRecorder,
) -> None:
    criterion = nn.Bilinear(2, 2, 1)
    other = make(model=nn.Linear(2, 2))

    def with_criterion(model: nn.Module, batch: Pair) -> tuple[Tensor, float]:
        outputs = model(batch[0])
        return criterion(outputs, outputs).sum(), len(batch[0])

    def with_other_engine(model: nn.Module, batch: Pair) -> tuple[Tensor, float]:
        return other.module(model(batch[0])).square().sum(), len(batch[0])

    make(with_other_engine).step([pair()])
    assert not recwarn
    engine = make(with_criterion)
    for _ in range(2):
        engine.step([pair(), pair()])
    (found,) = (str(warning.message) for warning in recwarn)
    assert found.startswith(
        "the loss depends on parameters outside of the model, of shape (1,), (1, 2, 2), which the e"
    )
    criterion.requires_grad_(False)
    make(with_criterion).step([pair()])
    assert len(recwarn) == 1


# Updates that would be lost


def remove_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def test_a_hook_that_removes_gradients_is_refused() -> None:
    model = nn.Linear(3, 2)
    model.bias.register_post_accumulate_grad_hook(remove_gradient)
    with pytest.raises(TrainingError, match="a hook has set the gradient of 'bias' to None"):
        make(model=model).step([pair()])


def clearing(*, to_none: bool) -> Callable[..., Any]:
    def loss(model: nn.Module, batch: Pair) -> tuple[Tensor, float]:
        model.zero_grad(set_to_none=to_none)
        return summed(model, batch)

    return loss


def setting(model: nn.Module, batch: Pair) -> tuple[Tensor, float]:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return summed(model, batch)


@ranks(2)
def test_gradients_of_shards_that_are_cleared_or_set_in_a_step_are_refused() -> None:
    parallel = ParallelConfig(sharding=ShardingConfig(accumulate="sharded"))
    cleared = "has cleared or changed the gradient of '(weight|bias)'"
    for to_none in (True, False):
        loss = clearing(to_none=to_none)
        for strategy in ("fsdp", "hsdp"):
            engine = make(loss, strategy=strategy, parallel=parallel)
            engine.step([pair()])
            with pytest.raises(TrainingError, match=cleared):
                engine.step([pair(), pair()])
            engine = make(setting, strategy=strategy, parallel=parallel)
            with pytest.raises(TrainingError, match=cleared):
                engine.step([pair()])
    engine = make(strategy="fsdp", parallel=parallel)
    engine.step([pair(), pair()])
    engine.model.get_parameter("bias").register_post_accumulate_grad_hook(remove_gradient)
    with pytest.raises(TrainingError, match=cleared):
        engine.step([pair()])


def test_writes_through_data_to_copies_of_weights_are_refused() -> None:
    for steps in range(3):
        engine = make(policy="bf16")
        for _ in range(steps):
            engine.step([pair()])
            engine.publish_weights()
        engine.model.get_parameter("weight").data.clamp_(max=0.0)
        with pytest.raises(ConfigError, match=r"weight.*was written to .*param\.data"):
            engine.step([pair()])
    engine = make(policy="bf16", first_step_checks=False)
    engine.model.get_parameter("weight").data.clamp_(max=0.0)
    engine.step([pair()])


def write(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.add_(1)


LOST = [("bf16", {}), ("bf16-pure", {}), ("bf16", {"shard_optimizer": True})]


@ranks(2)
@in_turn(("policy", "options"), [*LOST, ("fp32", {"shard_optimizer": True})])
def test_gradients_that_a_hook_sets_where_they_are_not_read_are_refused(
    policy: str, options: dict[str, Any]
) -> None:
    def replace(parameter: nn.Parameter) -> None:
        parameter.grad = torch.ones(parameter.shape)

    def zero(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad.zero_()

    changes: list[Callable[[nn.Parameter], None]] = [replace]
    if not options:
        changes.append(remove_gradient)
    if policy == "bf16-pure":
        changes.append(zero)
    for change in changes:
        engine = make(policy=policy, **options)
        engine.optimizer.register_step_post_hook(lambda *_, e=engine: e.model.zero_grad())
        engine.step([pair()])
        bias = engine.model.get_parameter("bias")
        engine.optimizer.register_step_pre_hook(lambda *_, c=change, b=bias: c(b))
        with pytest.raises(TrainingError, match=r"pre-hook of the optimizer has changed \.grad"):
            engine.step([pair()])


def test_gradients_that_a_hook_sets_where_they_are_read_count() -> None:
    for policy in ("fp32", "bf16"):
        engine = make(policy=policy)
        before = engine.weights()["bias"].clone()

        def zero(*_: object, engine: Engine = engine) -> None:
            for gradient in engine.gradients().values():
                assert gradient is not None
                gradient.zero_()

        engine.optimizer.register_step_pre_hook(zero)
        engine.step([pair()])
        assert torch.equal(engine.weights()["bias"], before)


@pytest.mark.parametrize("through_data", [False, True])
def test_writes_of_a_hook_to_copies_of_weights_are_refused(through_data: bool) -> None:
    engine = make(policy="bf16")
    bias = engine.model.get_parameter("bias")
    clamped = bias.data if through_data else bias.detach()
    engine.step([pair()])
    engine.optimizer.register_step_post_hook(lambda *_: clamped.fill_(0.5))
    with pytest.raises(ConfigError, match="bias': was written to"):
        engine.step([pair()])


def test_writes_in_forward_to_copies_of_weights_are_refused_in_every_step() -> None:
    model = nn.Linear(3, 2)
    engine = make(model=model, policy="bf16", first_step_checks=False)
    engine.step([pair()])
    model.register_forward_pre_hook(lambda *_: write(model.weight))
    with pytest.raises(ConfigError, match="weight': was written to"):
        engine.step([pair()])


@ranks(2)
@in_turn(("policy", "options"), [LOST[0], LOST[2], ("fp32", {"shard_optimizer": True})])
def test_weights_that_are_changed_without_publishing_are_refused(
    policy: str, options: dict[str, Any]
) -> None:
    engine = make(policy=policy, **options)
    engine.step([pair()])
    for publishes in (True, False):
        for weight in engine.weights().values():
            weight.mul_(0.5)
        if publishes:
            engine.publish_weights()
            engine.step([pair()])
    with pytest.raises(TrainingError, match=r"changed without engine\.publish_weights\(\)"):
        engine.step([pair()])


@pytest.mark.parametrize("policy", ["fp32", "bf16-autocast", "bf16-pure"])
@pytest.mark.parametrize("every", [1, 4])
def test_second_optimizer_is_warned_of_once(
    policy: str, every: int, recwarn: pytest.WarningsRecorder
) -> None:
    model = nn.Linear(3, 2)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = make(model=model, policy=policy)
    for step in range(1, 20):
        engine.step([pair()])
        if step % every == 0:
            other.step()
            other.zero_grad()
        assert len(recwarn) == (step > 3 * every)
    assert recwarn.pop().filename == __file__


def test_second_optimizer_is_named_under_master_weights() -> None:
    model = nn.Linear(3, 2)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = make(model=model, policy="bf16")
    engine.step([pair()])
    other.step()
    with pytest.raises(ConfigError, match=r"was written to .*another optimizer's step\(\)"):
        engine.step([pair()])


@pytest.mark.parametrize("publish", [True, False])
def test_changes_of_weights_that_are_published_or_rare_are_not_warned_of(
    publish: bool, recwarn: pytest.WarningsRecorder
) -> None:
    engine = make()
    for step in range(20):
        engine.step([pair()])
        if publish or step in (0, 1, 17, 18):
            with torch.no_grad():
                for weight in engine.weights().values():
                    weight.clamp_(-1, 1)
        if publish:
            engine.publish_weights()
    assert not recwarn


def test_loads_between_steps_are_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    engine = make()
    start = {name: value.clone() for name, value in engine.state_dict().items()}
    for _ in range(5):
        engine.step([pair()])
        engine.load_state_dict(start)
    assert not recwarn


@ranks(2)
@in_turn("write", [write, lambda weight: weight.data.mul_(2)])
def test_lost_write_on_one_rank_fails_on_all_ranks(write: Callable[[Tensor], object]) -> None:
    engine = make(policy="bf16")
    if engine.world.rank == 0:
        write(engine.model.get_parameter("weight"))
    error = ConfigError if engine.world.rank == 0 else SetupError
    with pytest.raises(error, match="weight': was written to"):
        engine.step([pair()])


@ranks(2)
@in_turn("shard", [False, True])
def test_weights_that_differ_between_ranks_fail_in_the_first_step(shard: bool) -> None:
    engine = make(policy="fp32", shard_optimizer=shard)
    torch.manual_seed(engine.world.rank)
    nn.init.normal_(engine.model.get_parameter("bias").data)
    message = r"values of \S*bias = .* on rank 0; .* on rank 1: differs"
    with pytest.raises(ConfigError, match=message):
        engine.step([pair()])


@ranks(2)
@in_turn(("policy", "strategy"), [("fp32", "ddp"), ("bf16", "ddp"), ("fp32", "fsdp")])
def test_weights_that_only_one_rank_writes_to_are_refused_in_every_step(
    policy: str, strategy: str
) -> None:
    engine = make(policy=policy, strategy=strategy, device="cpu")
    for _ in range(2):
        engine.weights()["weight"].mul_(2)
        engine.publish_weights()
        engine.step([pair()])
    if engine.world.rank == 0:
        engine.weights()["weight"].mul_(2)
    values = r"values of weight = .* on rank 0; .* on rank 1: differs"
    with pytest.raises(ConfigError, match=values) if strategy == "ddp" else nullcontext():
        engine.publish_weights()
    calls = r"writes to weights .*publish_weights.* = \d+ on rank 0; \d+ on rank 1: differs"
    with pytest.raises(ConfigError, match=calls):
        engine.step([pair()])
    engine.load_state_dict(engine.state_dict())
    engine.step([pair()])


@ranks(2)
@in_turn(("policy", "steps"), [("fp32", 0), ("fp32", 1), ("bf16", 0), ("bf16", 1)])
def test_the_last_element_of_a_large_weight_that_one_rank_writes_to_is_compared(
    policy: str, steps: int
) -> None:
    engine = make(model=nn.Linear(3, 2**15), policy=policy)
    for _ in range(steps):
        engine.step([pair()])
    weights = engine.weights()["weight"].data
    weights[-1, -1] += float(engine.world.rank)
    call = engine.publish_weights if steps else partial(engine.step, [pair()])
    message = r"values of weight = .* on rank 0; .* on rank 1: differs"
    with pytest.raises(ConfigError, match=message):
        call()


@ranks(2)
@in_turn(("policy", "shard"), [("fp32", False), ("bf16", False), ("bf16", True)])
def test_published_weights_may_be_written_to_by_one_rank_and_broadcast(
    policy: str, shard: bool
) -> None:
    engine = make(policy=policy, shard_optimizer=shard)
    for value in (0.5, 0.25):
        weights = engine.weights()
        if engine.world.rank == 0:
            weights["weight"].fill_(value).mul_(1.0)
        if not shard:
            dist.broadcast(weights["weight"], 0)
        engine.publish_weights()
        engine.step([pair()])


@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-pure"])
def test_step_after_a_failed_update_is_refused_until_a_state_is_loaded(
    policy: str, tmp_path: Path
) -> None:
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            super().step()
            if self.fails:
                raise ValueError("failed")

    engine = Engine(nn.Linear(3, 2), summed, lambda named: Failing(named, lr=0.1), policy=policy)
    engine.step([pair()])
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    with mock.patch.object(Failing, "fails", True), pytest.raises(ValueError, match="failed"):
        engine.step([pair()])
    calls = (engine.step, engine.evaluate, lambda _: engine.save(tmp_path))
    for call in (*calls, lambda _: engine.export(tmp_path / "weights")):
        with pytest.raises(TrainingError, match="failed during its update, or a state"):
            call([pair()])
    engine.load_state_dict(state)
    assert engine.step([pair()]).numbers.applied_total == 2
    interrupted = mock.patch.object(engine.divergence, "remember", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        engine.step([pair()])
    assert engine.step_counts[0] == 2
    with pytest.raises(TrainingError, match="failed during its update"):
        engine.save(tmp_path)


@ranks(1)
@in_turn("strategy", ["ddp", "fsdp"])
def test_module_can_only_be_pickled_as_state(strategy: str) -> None:
    engine = make(policy="bf16", strategy=strategy)
    with pytest.raises(TrainingError, match=r"cannot be pickled .*use engine\.export"):
        torch.save(engine.module, io.BytesIO())
    if strategy == "ddp":
        values = torch.ones(1, 3)
        assert torch.equal(copy.deepcopy(engine.module)(values), engine.module(values))


@pytest.mark.parametrize("policy", ["bf16", "bf16-pure", "fp16"])
@pytest.mark.parametrize("wrap", [spectral_norm, parametrizations.orthogonal])
def test_weights_computed_from_fp32_buffers_stay_fp32(policy: str, wrap: Any) -> None:
    layer = nn.Linear(3, 3)
    model = nn.Sequential(wrap(layer), parametrizations.spectral_norm(nn.Linear(3, 2)))
    assert make(model=model, policy=policy).step([pair()]).numbers.applied_total == 1
    assert layer.weight.dtype == torch.float32


def test_sparse_tensors_are_refused() -> None:
    sparse = torch.eye(2, 3).to_sparse()
    for name, tensor in (("weight", nn.Parameter(sparse)), ("adjacency", sparse)):
        model = nn.Linear(3, 2)
        model.register_buffer("adjacency", None)
        setattr(model, name, tensor)
        with pytest.raises(ConfigError, match=f"model = '{name}': is sparse"):
            make(model=model)


@pytest.mark.parametrize("built_inside", [False, True])
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_models_and_engines_that_are_built_in_inference_mode_are_refused(
    policy: str, built_inside: bool
) -> None:
    with torch.inference_mode(not built_inside):
        model = nn.Linear(3, 2)
    with (
        torch.inference_mode(built_inside),
        pytest.raises(ConfigError, match="inference mode; build model and engine outside of it"),
    ):
        make(model=model, policy=policy)


@ranks(2)
@in_turn(("options", "frozen"), [({"shard_optimizer": True}, False), ({}, True)])
def test_writes_of_one_rank_to_shards_and_frozen_weights_are_refused(
    options: dict[str, Any], frozen: bool
) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].requires_grad_(not frozen)
    engine = make(model=model, policy="fp32", device="cpu", **options)
    engine.step([pair()])
    if engine.world.rank == 1:
        with torch.no_grad():
            engine.module[0].weight.mul_(2)
    with pytest.raises(ConfigError, match=r"writes to weights .* = \d+ on rank 0; \d+ on rank 1"):
        engine.step([pair()])


def test_buffers_of_a_failed_step_are_reverted_before_others_are_loaded() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    failing = [False]

    def loss(module: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        total = module(batch).square().sum()
        if failing[0]:
            raise ValueError("bad sample")
        return total, len(batch)

    engine = make(model=model, loss=loss, policy="fp32", device="cpu")
    engine.step([torch.randn(4, 3)])
    failing[0] = True
    with pytest.raises(ValueError, match="bad sample"):
        engine.step([torch.randn(4, 3)])
    failing[0] = False
    assert model[0].num_batches_tracked == 1
    model[0].num_batches_tracked.fill_(7)
    engine.step([torch.randn(4, 3)])
    assert model[0].num_batches_tracked == 8


@ranks(2)
def test_embeddings_that_change_their_weight_in_forward_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model = '0': has max_norm=1\.0, which would change"):
        make(model=nn.Sequential(nn.EmbeddingBag(8, 3, max_norm=1.0), nn.Linear(3, 2)))


@ranks(2)
def test_a_learning_rate_in_a_tensor_that_differs_between_ranks_is_refused() -> None:
    engine = make()
    engine.optimizer.param_groups[0]["lr"] = torch.tensor(0.5 * (1 + engine.world.rank))
    with pytest.raises(ConfigError, match=r"\['lr'\] = 0\.5 on rank 0; 1\.0 on rank 1: differs"):
        engine.step([pair()])


@ranks(2)
def test_a_rank_that_ends_before_it_builds_its_engine_is_reported() -> None:
    closed = RuntimeError("Connection closed by peer")
    with (
        mock.patch.object(dist, "all_gather_object", side_effect=closed),
        pytest.raises(LostPeerError, match="stops because another rank has ended"),
    ):
        make()


@ranks(2)
@in_turn("part", ["model", "optimizer"])
def test_a_state_that_only_one_rank_loads_is_refused(part: str) -> None:
    engine = make()
    engine.step([pair()])
    if engine.world.rank == 0:
        loaded = getattr(engine, part)
        loaded.load_state_dict(loaded.state_dict())
    calls = rf"calls of {part}\.load_state_dict = 1 on rank 0; 0 on rank 1: differs"
    with pytest.raises(ConfigError, match=calls):
        engine.step([pair()])


@ranks(2)
def test_invalid_microbatches_of_one_rank_fail_on_all_ranks() -> None:
    engine = make()
    batches = [] if engine.world.rank == 1 else [pair()]
    with pytest.raises(DistmpError, match=r"microbatches = .*: is empty"):
        engine.step(batches)
    engine.step([pair()])  # ranks continue together


class Clamped(nn.Linear):
    """Writes to its weight in forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@ranks(2)
def test_writes_in_forward_that_would_be_lost_are_refused() -> None:
    def sum_of(model: nn.Module, batch: Pair) -> Any:
        return model(batch[0]).square().sum(), len(batch[0])

    codebook = nn.Parameter(torch.ones(2, 3), requires_grad=False)
    for strategy, policy in (("ddp", "bf16"), ("fsdp", "fp32"), ("fsdp", "bf16")):
        for frozen in (False, True):
            model = Clamped(3, 3)
            if frozen:
                if strategy == "ddp":
                    continue
                model.weight = nn.Parameter(codebook.repeat(2, 1)[:3], requires_grad=False)
            engine = make(sum_of, model, policy=policy, strategy=strategy, device="cpu")
            with pytest.raises(ConfigError, match=r"weight.*was written to .*in forward"):
                engine.step([pair()])


# Steps that are skipped


def spoiled(samples: int = 4) -> Pair:
    return torch.full((samples, 3), math.inf), torch.zeros(samples, dtype=torch.int64)


def test_ten_skipped_steps_in_a_row_are_warned_of_once() -> None:
    engine = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(9):
            engine.step([spoiled()])
    with pytest.warns(RuntimeWarning) as found:
        engine.step([spoiled()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step([spoiled()])
    assert len(found) == 1
    assert found[0].filename == __file__
    text = str(found[0].message)
    assert text.startswith("10 steps in a row were skipped, so nothing is trained: bad input: 12")
    assert text.endswith("engine.step raises an error after max_consecutive_skips = 50")


@pytest.mark.parametrize("host_waits", [True, False])
def test_loop_without_check_ends_after_too_many_skipped_steps(
    host_waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineSetup, "host_waits", host_waits)
    engine = make(max_consecutive_skips=3)
    for _ in range(2 if host_waits else 3):
        engine.step([spoiled()])
    with pytest.raises(TrainingError, match=r"max_consecutive_skips = 3: .* bad input: 12 inf"):
        engine.step([spoiled()])


@ranks(2)
def test_all_ranks_end_loop_without_check() -> None:
    engine = make(strategy="ddp", max_consecutive_skips=2)
    batches = [spoiled() if dist.get_rank() == 1 else pair()]
    engine.step(batches)
    with pytest.raises(TrainingError, match="on rank 1 of 2 only"):
        engine.step(batches)


@pytest.mark.parametrize("before", [3, 10, 12])
def test_later_row_of_skipped_steps_is_warned_of_once(
    before: int, recwarn: pytest.WarningsRecorder
) -> None:
    engine = make()
    for _ in range(before):
        engine.step([pair()])
    for _ in range(40):
        engine.step([spoiled()])
    found = [str(warning.message) for warning in recwarn]
    assert len(found) == 1
    assert found[0].startswith("10 steps in a row were skipped")


def test_steps_without_weight_are_warned_of() -> None:
    engine = make(lambda model, batch: (summed(model, batch)[0], 0.0))
    for _ in range(9):
        engine.step([pair()])
    with pytest.warns(RuntimeWarning, match="no microbatch of any rank had a weight above 0"):
        engine.step([pair()])


def test_a_loop_that_calls_check_is_not_warned() -> None:
    engine = make(max_consecutive_skips=12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(11):
            engine.check(engine.step([spoiled()]))
        twelfth = engine.step([spoiled()])
    with pytest.raises(TrainingError, match="max_consecutive_skips = 12"):
        engine.check(twelfth)


def test_a_device_that_is_not_waited_for_is_read_one_step_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(EngineSetup, "host_waits", False)
    engine = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            engine.step([spoiled()])
    with pytest.warns(RuntimeWarning, match="bad input"):
        engine.step([spoiled()])


def test_steps_before_a_load_are_not_those_of_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineSetup, "host_waits", False)
    engine = make(max_consecutive_skips=3)
    engine.step([pair()])
    state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    before = [engine.step([spoiled()]) for _ in range(3)]
    engine.load_state_dict(state)
    assert not engine.step([pair()]).numbers.skipped
    assert engine.explain(before[-1]) is None


@ranks(2)
def test_only_rank_0_warns_and_all_ranks_look_for_the_cause() -> None:
    engine = make(strategy="ddp")
    rank = dist.get_rank()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(10):
            engine.step([spoiled() if rank == 1 else pair()])
    of_skips = [entry for entry in found if "in a row were skipped" in str(entry.message)]
    assert len(of_skips) == (rank == 0)
    assert all("on rank 1 of 2 only" in str(entry.message) for entry in of_skips)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids)


@pytest.mark.parametrize(("ids", "found"), [([0, 8], "from 0 to 8"), ([0, -1], "from -1 to 0")])
def test_ids_that_an_embedding_lacks_are_explained(ids: list[int], found: str) -> None:
    engine = make(lambda model, batch: (model(batch[0]).sum(), 1), Words())
    for _ in range(2):  # also after a step that failed, which does not count
        message = rf"(?s)out of range on rank 0 in step 1: .* have 8 rows; .* {found}\n"
        with pytest.raises(TrainingError, match=message):
            engine.step([(torch.tensor([ids]), torch.zeros(1))])
    engine.step([(torch.tensor([[0, 7]]), torch.zeros(1))])


class CreatesTensor(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(torch.ones(1, 3, 3)).sum() + inputs.sum()


@pytest.mark.parametrize("layer", [nn.Linear(3, 2), nn.Conv1d(3, 2, 1)])
def test_fp32_tensor_of_forward_is_explained_under_16_bit_policy(layer: nn.Module) -> None:
    def loss(model: nn.Module, batch: Pair) -> tuple[Tensor, int]:
        return model(batch[0]), 1

    make(loss, CreatesTensor(layer), policy="bf16-autocast").step([pair()])
    message = (
        r"precision\.policy = 'bf16': .*; parameters have 16 bits, so .*dtype=x\.dtype.* call it"
    )
    with pytest.raises(ConfigError, match=message):
        make(loss, CreatesTensor(copy.deepcopy(layer)), policy="bf16").step([pair()])


def test_loss_and_optimizer_in_wrong_order_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss = .*: Engine\(model, loss, optimizer\)"):
        make(lambda named: torch.optim.SGD(named))
