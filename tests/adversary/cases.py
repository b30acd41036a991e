"""Random cases as plain values: a run of a few steps in one line of JSON.

`generate(seed, index, world_size)` draws a case. `legal` corrects combinations that the
documentation excludes, so that the shrinker may change anything. `refusal` names the combinations
that may be refused with an error.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
import types
import typing
from dataclasses import dataclass, field, replace
from typing import Any

SHARDED = ("fsdp", "hsdp")
MASTERS = ("bf16", "fp16", "fp16-static", "bf16,reduce=bf16", "bf16,keep_fp32=head")
SCALED = ("fp16", "fp16-autocast", "fp16-static")
POLICIES = ("fp32", "tf32", "bf16-autocast", "bf16-pure", "fp16-autocast", *MASTERS)

# Optional parts of the model: a vector in the first block, a vector and a module at the root, and
# the last block.
PARTS = ("extra", "offset", "side", "block")

VALUES = ("nan", "inf", "-inf")


@dataclass(frozen=True)
class Fault:
    """A non-finite value that is injected.

    Attributes:
        place: "input", "stem" (forward, after the first layer), "output" (forward), "backward"
            (only the gradient), "weight" (what the loss returns) or "loss" (a constant added to
            the loss: its gradient is finite).
        value: "nan", "inf" or "-inf".
    """

    place: str
    value: str


@dataclass(frozen=True)
class Microbatch:
    """One batch of one rank.

    Attributes:
        size: Number of samples; may be 0 for models without batch norm.
        weight: Weight of each sample; 0 masks all of them.
        uses: The optional parts of the model that the batch uses.
        fault: The injected fault, if any.
    """

    size: int = 4
    weight: float = 1.0
    uses: tuple[str, ...] = PARTS
    fault: Fault | None = None

    @property
    def total(self) -> float:
        return self.size * self.weight


@dataclass(frozen=True)
class Step:
    """A step, and events before it.

    Attributes:
        ranks: The microbatches of every rank.
        freeze: Parameters that are frozen before this step.
        thaw: Parameters that are unfrozen before this step.
        rates: Learning rates of the parameter groups, set manually before this step.
        stop: The rank that requests to stop.
        reload: Whether to continue with a new engine that loads the state.
        explain: Whether to call `explain` if the step overflows.
        evaluate: Whether to evaluate on the microbatches of this step after it.
    """

    ranks: tuple[tuple[Microbatch, ...], ...]
    freeze: tuple[str, ...] = ()
    thaw: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    stop: int | None = None
    reload: bool = False
    explain: bool = False
    evaluate: bool = False

    @property
    def faults(self) -> list[tuple[int, int, Fault]]:
        """Return (rank, microbatch, fault) of all faults."""
        return [
            (rank, index, batch.fault)
            for rank, batches in enumerate(self.ranks)
            for index, batch in enumerate(batches)
            if batch.fault is not None
        ]


@dataclass(frozen=True)
class ModelSpec:
    """A model of a few hundred parameters.

    Attributes:
        kind: "linear", "conv" or "embedding".
        width: Width of the hidden layers.
        blocks: Number of residual blocks.
        activation: "tanh", "gelu", "silu" or "relu"; at the kink of ReLU, rounding has large
            effects, see `judge`.
        norm: Whether blocks have a batch norm.
        tied: Whether the head of an embedding model shares the weight of the embedding.
        scalar: Whether blocks have a 0-dim parameter.
        unused: Whether the model has unused parameters.
        frozen: Parameters that are frozen when the engine is built.
        loss: "cross_entropy" or "mse".
    """

    kind: str = "linear"
    width: int = 4
    blocks: int = 1
    activation: str = "tanh"
    norm: bool = False
    tied: bool = False
    scalar: bool = False
    unused: bool = False
    frozen: tuple[str, ...] = ()
    loss: str = "cross_entropy"


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer of torch with one or two parameter groups.

    Attributes:
        name: "sgd", "adam" or "adamw".
        lr: Learning rate of the first group.
        weight_decay: Weight decay of the first group.
        momentum: Momentum of SGD.
        nesterov: Whether SGD uses Nesterov momentum.
        betas: Coefficients of Adam and AdamW.
        eps: Epsilon of Adam and AdamW; large, so that rounding of small gradients has small
            effects.
        implementation: "fused", "foreach", "single" or "default".
        groups: Number of groups; the second one has the biases, half the rate and no weight decay.
    """

    name: str = "sgd"
    lr: float = 0.1
    weight_decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-2
    implementation: str = "default"
    groups: int = 1


@dataclass(frozen=True)
class ScaleSpec:
    """The fields of `distmp.LossScaleConfig`."""

    dynamic: bool = True
    init: float = 256.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = 2.0**24


@dataclass(frozen=True)
class Case:
    """A training run.

    Attributes:
        seed: Seed of initial weights and data.
        steps: The steps.
        model: The model.
        optimizer: The optimizer.
        schedule: Name and parameter of a learning-rate schedule; () for none.
        scale: Rules of the loss scale; None for those of the policy.
        weight_kind: Type of the weight that the loss returns: "int", "float", "tensor" or "long".
        other fields: Arguments of `Engine` and its `ParallelConfig`.
    """

    seed: int
    world_size: int
    steps: tuple[Step, ...]
    strategy: str = "single"
    policy: str = "fp32"
    model: ModelSpec = field(default_factory=ModelSpec)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    schedule: tuple[str, float] | tuple[()] = ()
    max_norm: float | None = None
    scale: ScaleSpec | None = None
    nominal_weight: float | None = None
    shard_optimizer: bool = False
    reproducible: bool = False
    on_nonfinite: str = "skip_step"
    activation_checkpointing: str = "none"
    accumulate: str = "auto"
    reshard_after_forward: bool = True
    shard_size: int | None = None
    attribution: bool = True
    weight_kind: str = "int"

    @property
    def sharded(self) -> bool:
        return self.strategy in SHARDED

    @property
    def drops(self) -> bool:
        return self.on_nonfinite == "drop_microbatch"

    @property
    def microbatches(self) -> list[Microbatch]:
        """Return the batches of all steps and ranks."""
        return [batch for step in self.steps for batches in step.ranks for batch in batches]


# JSON


def dumps(case: Case) -> str:
    """Return the case as one line of JSON, without default values."""
    return json.dumps(_plain(case), separators=(",", ":"))


def loads(text: str) -> Case:
    return _parse(Case, json.loads(text))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    return {
        item.name: _plain(getattr(value, item.name))
        for item in dataclasses.fields(value)
        if getattr(value, item.name) != _default(item)
    }


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


_hints = functools.cache(typing.get_type_hints)


def _parse(kind: Any, value: Any) -> Any:
    """Return the value of this type that `_plain` converted."""
    if dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: _parse(hints[name], item) for name, item in value.items()})
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(kind) if option is not type(None)]
        return None if value is None else _parse(options[0], value)
    if typing.get_origin(kind) is tuple:
        first, *rest = typing.get_args(kind) or (Any,)
        return tuple(
            _parse(first if index == 0 or rest == [...] else rest[index - 1], item)
            for index, item in enumerate(value)
        )
    return float(value) if kind is float else value


# Combinations that the documentation excludes


def legal(case: Case) -> Case:
    """Return the nearest case that the documentation allows."""
    model = _legal_model(case)
    case = replace(case, model=model)
    if case.policy not in SCALED:
        case = replace(case, scale=None)
    if case.policy == "fp16-static":
        case = replace(case, scale=None)  # that of the policy
    if not case.sharded:
        case = replace(case, accumulate="auto", reshard_after_forward=True, shard_size=None)
    if case.reproducible:
        case = _reproducible(case)
    steps = tuple(_legal_step(case, step, index) for index, step in enumerate(case.steps))
    return replace(case, steps=steps)


def _legal_model(case: Case) -> ModelSpec:
    model = case.model
    if model.kind != "embedding":
        model = replace(model, tied=False)
    else:
        model = replace(model, loss="cross_entropy")
    if case.strategy in ("fsdp", "hsdp"):
        # torch does not shard 0-dim parameters, with its own error.
        model = replace(model, scalar=False)
    names = trainable_names(model)
    return replace(model, frozen=tuple(name for name in model.frozen if name in names))


def trainable_names(model: ModelSpec) -> tuple[str, ...]:
    """Return the parameters that are frozen and unfrozen in cases."""
    names = ["stem.weight", "blocks.0.core.bias", "blocks.0.core.weight", "blocks.0.extra"]
    if not model.tied:
        names.append("head.weight")
    if model.norm:
        names.append("blocks.0.norm.weight")
    return tuple(names)


def _reproducible(case: Case) -> Case:
    """Give all ranks the same power-of-two number of microbatches of the same size.

    docs/accumulation.md, "The same bits at any number of ranks".
    """
    first = case.steps[0].ranks[0]
    count = 1 << (len(first).bit_length() - 1)
    size = max(1, first[0].size)
    steps = tuple(
        replace(step, ranks=tuple(_alike(batches, count, size) for batches in step.ranks))
        for step in case.steps
    )
    policy = "bf16" if case.policy == "bf16,reduce=bf16" else case.policy
    return replace(case, steps=steps, policy=policy)


def reproducible_on(case: Case, size: int) -> Case:
    """Return a reproducible case with the same global microbatches on this number of ranks."""
    case = legal(replace(case, strategy="ddp"))
    steps = []
    for step in case.steps:
        batches = [batch for one in step.ranks for batch in one]
        each = len(batches) // size
        ranks = tuple(
            tuple(batches[first : first + each]) for first in range(0, len(batches), each)
        )
        steps.append(replace(step, ranks=ranks, stop=None, explain=False))
    strategy = "single" if size == 1 else "ddp"
    return replace(case, world_size=size, strategy=strategy, steps=tuple(steps))


def _alike(batches: tuple[Microbatch, ...], count: int, size: int) -> tuple[Microbatch, ...]:
    return tuple(replace(batch, size=size) for batch in _of_length(batches, count))


def _of_length(batches: tuple[Microbatch, ...], length: int) -> tuple[Microbatch, ...]:
    return (batches * length)[:length]


def _legal_step(case: Case, step: Step, index: int) -> Step:
    ranks = (step.ranks * case.world_size)[: case.world_size]
    if case.sharded:
        # The same number of microbatches on all ranks, which run the same modules.
        count = len(ranks[0])
        ranks = tuple(_of_length(batches, count) for batches in ranks)
        ranks = tuple(
            tuple(
                _same_blocks(batch, first) for batch, first in zip(batches, ranks[0], strict=True)
            )
            for batches in ranks
        )
    ranks = tuple(tuple(_legal_batch(case, batch) for batch in batches) for batches in ranks)
    step = replace(step, ranks=ranks)
    if index == 0:
        step = replace(step, freeze=(), thaw=(), reload=False)
    if case.schedule:  # which overrides other rates
        step = replace(step, rates=())
    names = trainable_names(case.model)
    step = replace(
        step,
        freeze=tuple(name for name in step.freeze if name in names),
        # Parameters that are frozen at the start stay frozen.
        thaw=tuple(n for n in step.thaw if n in names and n not in case.model.frozen),
        stop=None if step.stop is None else step.stop % case.world_size,
    )
    # Evaluation and state are allowed in all cases, but faults only in training.
    if step.evaluate and step.faults:
        step = replace(step, evaluate=False)
    return step


def _same_blocks(batch: Microbatch, first: Microbatch) -> Microbatch:
    """Return the batch; it uses the last block if the batch of rank 0 does."""
    uses = tuple(part for part in batch.uses if part != "block")
    return replace(batch, uses=(*uses, "block") if "block" in first.uses else uses)


def _legal_batch(case: Case, batch: Microbatch) -> Microbatch:
    if case.model.norm:
        # Batch norm needs several samples, and has large gradients for very few.
        batch = replace(batch, size=max(4, batch.size))
    if case.weight_kind in ("int", "long"):
        batch = replace(batch, weight=float(math.ceil(batch.weight)))
    if batch.fault is not None:
        place = batch.fault.place
        if place == "input" and case.model.kind == "embedding":
            place = "stem"
        size = batch.size if place in ("weight", "loss") else max(1, batch.size)
        batch = replace(batch, fault=replace(batch.fault, place=place), size=size)
        if place == "weight" and case.weight_kind in ("int", "long"):
            batch = replace(batch, fault=None)
    return replace(batch, uses=tuple(part for part in PARTS if part in batch.uses))


def refusal(case: Case) -> str | None:
    """Return why the engine may refuse a case with a `ConfigError`; None if it must accept it."""
    if case.policy == "bf16-pure" and case.shard_optimizer:
        return "docs/accumulation.md: shard_optimizer keeps a share of FP32 weights"
    if case.policy == "bf16-pure" and case.accumulate in ("sharded", "hybrid"):
        return "docs/precision.md: FSDP2 refuses 16-bit shards that should sum in FP32"
    return None


# Drawing


def generate(seed: int, index: int, world_size: int) -> Case:
    """Draw a case; the same arguments give the same case."""
    draw = random.Random(f"{seed}:{index}:{world_size}")
    model = _draw_model(draw)
    case = Case(
        seed=draw.randrange(1 << 30),
        world_size=world_size,
        steps=(),
        strategy=_draw_strategy(draw, world_size),
        policy=_draw_policy(draw),
        model=model,
        schedule=draw.choice([(), (), ("step", 2.0), ("exponential", 0.8), ("warmup", 4.0)]),
        max_norm=draw.choice([None, None, 0.05, 0.3, 1.0, 50.0]),
        nominal_weight=draw.choice([None, None, 8.0, 64.0]),
        activation_checkpointing=draw.choice(["none", "none", "none", "blocks"]),
        reshard_after_forward=draw.random() < 0.8,
        attribution=draw.random() < 0.9,
        weight_kind=draw.choice(["int", "float", "tensor", "tensor", "long"]),
    )
    case = replace(case, optimizer=_draw_optimizer(draw, case), scale=_draw_scale(draw, case))
    case = _draw_accumulation(draw, case)
    return legal(replace(case, steps=_draw_steps(draw, case)))


def _draw_strategy(draw: random.Random, world_size: int) -> str:
    if world_size == 1:
        return draw.choice(["single"] * 7 + ["ddp", "fsdp", "hsdp"])
    return draw.choice(["ddp"] * 9 + ["fsdp"] * 5 + ["hsdp"] * 3)


def _draw_policy(draw: random.Random) -> str:
    return draw.choice(["fp32"] * 9 + ["bf16"] * 2 + ["fp16"] * 3 + list(POLICIES))


def _draw_model(draw: random.Random) -> ModelSpec:
    model = ModelSpec(
        kind=draw.choice(["linear", "linear", "conv", "embedding"]),
        width=draw.choice([3, 4, 4, 6, 8]),
        blocks=draw.choice([1, 2, 2, 3]),
        activation=draw.choice(["tanh", "gelu", "silu", "relu"]),
        norm=draw.random() < 0.35,
        tied=draw.random() < 0.5,
        scalar=draw.random() < 0.3,
        unused=draw.random() < 0.25,
        loss=draw.choice(["cross_entropy", "cross_entropy", "mse"]),
    )
    if draw.random() < 0.3:
        model = replace(model, frozen=(draw.choice(trainable_names(model)),))
    return model


def _draw_optimizer(draw: random.Random, case: Case) -> OptimizerSpec:
    name = draw.choice(["sgd", "sgd", "adam", "adamw", "adamw"])
    momentum = draw.choice([0.0, 0.5, 0.9]) if name == "sgd" else 0.0
    exact = case.policy == "fp32"
    return OptimizerSpec(
        name=name,
        # Small, so that neither training nor rounding errors diverge.
        lr=draw.choice([0.03, 0.1]) * (1 - momentum)
        if name == "sgd"
        else draw.choice([0.01, 0.05]),
        weight_decay=draw.choice([0.0, 0.1, 0.5]),
        momentum=momentum,
        nesterov=momentum > 0 and draw.random() < 0.3,
        betas=draw.choice([(0.9, 0.99), (0.8, 0.95)]),
        eps=1e-2 if exact else 0.1,
        implementation=draw.choice(["fused", "fused", "foreach", "single", "default"]),
        groups=draw.choice([1, 2]),
    )


def _draw_scale(draw: random.Random, case: Case) -> ScaleSpec | None:
    if case.policy not in SCALED or draw.random() < 0.1:
        return None
    minimum = draw.choice([1.0, 1.0, 16.0, 128.0])
    return ScaleSpec(
        dynamic=draw.random() < 0.85,
        # The highest scales overflow without a fault.
        init=draw.choice([128.0, 256.0, 1024.0, 2.0**16, 2.0**20, 2.0**24]),
        growth_factor=draw.choice([2.0, 2.0, 4.0]),
        backoff_factor=draw.choice([0.5, 0.5, 0.25]),
        growth_interval=draw.choice([1, 1, 2, 2, 3, 2000]),
        hysteresis=draw.choice([1, 1, 2, 3]),
        min_scale=minimum,
        max_scale=2.0**24,
    )


def _draw_accumulation(draw: random.Random, case: Case) -> Case:
    if case.sharded:
        modes = ["auto", "sharded", "unsharded"] + ["hybrid"] * 2 * (case.strategy == "hsdp")
        sizes = [None, *(size for size in (1, 2, 4) if case.world_size % size == 0)]
        return replace(
            case,
            accumulate=draw.choice(modes),
            shard_size=draw.choice(sizes) if case.strategy == "hsdp" else None,
        )
    return replace(
        case,
        shard_optimizer=draw.random() < 0.3,
        reproducible=draw.random() < 0.15,
        on_nonfinite=draw.choice(["skip_step", "skip_step", "drop_microbatch"]),
    )


def _draw_steps(draw: random.Random, case: Case) -> tuple[Step, ...]:
    uneven = draw.random() < 0.7
    partial = draw.random() < 0.4  # some optional parts are not used
    faulty = draw.random() < 0.6
    thaws = draw.random() < 0.5
    frozen = set(case.model.frozen)
    steps = []
    for index in range(draw.randint(3, 6)):
        ranks = tuple(
            tuple(_draw_batch(draw, uneven, partial) for _ in range(draw.randint(1, 4)))
            for _ in range(case.world_size)
        )
        if draw.random() < 0.06:  # no weight on any rank
            ranks = tuple(tuple(replace(batch, weight=0.0) for batch in one) for one in ranks)
        if draw.random() < 0.15:  # no weight on one rank
            empty = draw.randrange(case.world_size)
            silent = tuple(replace(batch, weight=0.0) for batch in ranks[empty])
            ranks = (*ranks[:empty], silent, *ranks[empty + 1 :])
        if faulty and draw.random() < 0.4:
            ranks = _with_faults(draw, ranks)
        thaw = tuple(name for name in sorted(frozen) if thaws and index and draw.random() < 0.4)
        freeze = tuple(
            name
            for name in trainable_names(case.model)
            if thaws and name not in frozen and draw.random() < 0.03
        )
        frozen = (frozen - set(thaw)) | set(freeze)
        rates = [draw.choice([0.0, 0.02, 0.1]) for _ in range(case.optimizer.groups)]
        steps.append(
            Step(
                ranks=ranks,
                freeze=freeze,
                thaw=thaw,
                rates=tuple(rates) if draw.random() < 0.15 else (),
                stop=draw.randrange(case.world_size) if draw.random() < 0.05 else None,
                reload=draw.random() < 0.06,
                explain=draw.random() < 0.3,
                evaluate=draw.random() < 0.1,
            )
        )
    return tuple(steps)


def _draw_batch(draw: random.Random, uneven: bool, partial: bool) -> Microbatch:
    uses = tuple(part for part in PARTS if not partial or draw.random() < 0.5)
    if not uneven:
        return Microbatch(size=4, uses=uses)
    return Microbatch(
        size=draw.choice([0, 1, 2, 4, 4, 5, 7]),
        weight=draw.choice([0.0, 0.5, 1.0, 1.0, 1.0, 3.0]),
        uses=uses,
    )


def _with_faults(
    draw: random.Random, ranks: tuple[tuple[Microbatch, ...], ...]
) -> tuple[tuple[Microbatch, ...], ...]:
    """Inject a fault into one or several microbatches."""
    broken = [list(batches) for batches in ranks]
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        batches = draw.choice(broken)
        index = draw.randrange(len(batches))
        places = ["input", "input", "stem", "output", "backward", "backward", "weight", "loss"]
        fault = Fault(draw.choice(places), draw.choice(VALUES))
        batches[index] = replace(batches[index], fault=fault)
    return tuple(tuple(batches) for batches in broken)
