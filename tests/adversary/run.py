"""Runs cases with `distmp.Engine` on real ranks, and checks the results.

The ranks are started once for many cases. All of them run the same cases in the same order; each
checks its share of the records while the others continue. A rank writes its complaints to a file at
once, so that nothing is lost if a later case hangs or ends the process. Then the ranks are started
again for the remaining cases.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import hashlib
import io
import json
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distmp import ConfigError, Engine, LossScaleConfig
from distmp.parallel import ParallelConfig
from distmp.parallel.settings import ShardingConfig
from tests.adversary import judge
from tests.adversary.cases import Case, OptimizerSpec, Step, dumps, loads
from tests.adversary.models import build_batches, build_model, loss
from tests.adversary.states import State, assemble, pieces
from tests.ranks import run_ranks

# A case takes a fraction of a second, so a rank that takes longer than this hangs.
CASE_SECONDS = 60.0
# How long the other ranks may take after one rank has failed.
FAILED_SECONDS = 5.0


@dataclass
class StepRecord:
    """Records of one rank for a step.

    Attributes:
        numbers: `StepNumbers` as a mapping.
        state: The rank's part of the state after the step.
        report: The result of `explain`, if it was called.
        evaluation: The result of `evaluate`, if it was called.
        after: The rank's part of the state after these calls.
    """

    numbers: dict[str, Any]
    state: State
    report: dict[str, Any] | None = None
    evaluation: float | None = None
    after: State | None = None


@dataclass
class Record:
    """Records of one rank for a case.

    Attributes:
        steps: Records of the steps.
        initial: The rank's part of the state before the first step.
        parameters: Parameters of an unsharded model, in the dtype of the module.
        refused: The `ConfigError` that refused the case, if any.
    """

    steps: list[StepRecord]
    initial: State = field(default_factory=dict)
    parameters: State = field(default_factory=dict)
    refused: str | None = None


# Functions of the test process


def run_cases(cases: Sequence[Case], seconds: float = 900.0) -> list[list[str]]:
    """Run cases of one world size; return the complaints about each."""
    decisions: dict[int, list[str]] = {}
    deadline = time.monotonic() + seconds
    first = 0
    while first < len(cases):
        found = _run_from(cases, first, max(30.0, deadline - time.monotonic()))
        decisions |= found
        first = max(found) + 1
    return [decisions[index] for index in range(len(cases))]


def _run_from(cases: Sequence[Case], first: int, seconds: float) -> dict[int, list[str]]:
    """Start ranks and run cases until they fail, at least one."""
    world_size = cases[first].world_size
    texts = [dumps(case) for case in cases[first:]]
    with tempfile.TemporaryDirectory(prefix="adversary-") as directory:
        failure = None
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):  # the same warnings in every case
                run_ranks(run_batch, world_size, texts, directory, timeout=seconds)
        except pytest.fail.Exception as error:
            failure = f"{error}\n{output.getvalue()[-2000:]}"
        lines = [
            json.loads(line)
            for path in sorted(Path(directory).glob("*.jsonl"))
            for line in path.read_text().splitlines()
        ]
        stacks = [path.read_text() for path in sorted(Path(directory).glob("*.stack"))]
    return _verdicts(first, lines, failure, stacks)


def _verdicts(
    first: int, lines: list[list[Any]], failure: str | None, stacks: list[str]
) -> dict[int, list[str]]:
    """Collect the lines of all ranks: [case, complaints or None, time of an error]."""
    errors = sorted((time, index, complaints) for index, complaints, time in lines if time)
    judged = {first + index: complaints for index, complaints, time in lines if complaints}
    judged |= {first + index: [] for index, complaints, _ in lines if complaints == []}
    begun = max((first + index for index, *_ in lines), default=first)
    if errors:
        # The first error; errors of other ranks are often lost connections.
        judged[begun] = errors[0][2]
    elif failure is not None and begun not in judged:
        judged[begun] = ["crash: " + "\n".join([failure, *filter(None, stacks)])]
    for index in range(first, begun):
        judged.setdefault(index, ["crash: the rank that judged this case ended"])
    return judged


# Functions of the ranks


def run_batch(texts: list[str], directory: str) -> None:
    """Run the cases; stop after the first one that leaves the ranks in an unknown state."""
    control = dist.new_group(backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    gc.freeze()  # so that garbage collection after a case need not scan torch
    with (
        Path(directory, f"{rank}.stack").open("w") as stacks,
        Path(directory, f"{rank}.jsonl").open("w", buffering=1) as log,
    ):
        for index, text in enumerate(texts):
            case = loads(text)
            print(json.dumps([index, None, None]), file=log)
            faulthandler.dump_traceback_later(CASE_SECONDS, exit=True, file=stacks)
            record, error = _attempt(case)
            if error is not None:
                print(json.dumps([index, [error], time.monotonic()]), file=log)
                faulthandler.dump_traceback_later(FAILED_SECONDS, exit=True, file=stacks)
            errors: list[str | None] = [None] * world_size
            dist.all_gather_object(errors, error, group=control)
            if any(error is not None for error in errors):
                faulthandler.cancel_dump_traceback_later()
                return
            judge_rank = index % world_size
            records: list[Any] | None = [None] * world_size if rank == judge_rank else None
            dist.gather_object(record, records, dst=judge_rank, group=control)
            faulthandler.cancel_dump_traceback_later()
            if records is not None:
                print(json.dumps([index, _judge(case, records), None]), file=log)


def _judge(case: Case, records: list[Record]) -> list[str]:
    try:
        return judge.judge(case, records)
    except Exception:  # noqa: BLE001  (a judge that fails must not take the other cases with it)
        return ["judge: " + traceback.format_exc()]


def _attempt(case: Case) -> tuple[Record | None, str | None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run_case(case), None
    except Exception:  # noqa: BLE001  (whatever it is, it becomes the decision)
        return None, "error: " + traceback.format_exc()
    finally:
        # Reproducible cases change these settings of the process.
        torch.use_deterministic_algorithms(False)
        gc.collect()


def run_case(case: Case) -> Record:
    """Run a case on this rank."""
    try:
        model, engine = _build(case, build_model(case, dist.get_rank()))
    except ConfigError as error:
        return Record([], refused=str(error))
    record = Record([], initial=pieces(engine.state_dict()))
    for index, step in enumerate(case.steps):
        if step.reload:
            model, engine = _reload(case, model, engine)
        record.steps.append(_step(case, model, engine, index, step))
    if not case.sharded:
        record.parameters = pieces(dict(model.named_parameters()))
    return record


def final_bits(texts: list[str]) -> list[str]:
    """Run cases; return the SHA-1 of the final weights and optimizer state of each."""
    return [_final_bits(loads(text)) for text in texts]


def _final_bits(case: Case) -> str:
    record, error = _attempt(case)
    assert record is not None, error
    buffers = {f"model/{name}" for name, _ in build_model(case).named_buffers()}
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, record.steps[-1].state)
    wholes, _ = assemble(states)
    digest = hashlib.sha1()
    for name in sorted(wholes):
        if name.startswith(("model/", "optimizer/")) and name not in buffers:
            bits = wholes[name].contiguous().view(-1).view(torch.uint8)
            digest.update(name.encode() + bits.numpy().tobytes())
    return digest.hexdigest()


def _step(case: Case, model: nn.Module, engine: Engine, index: int, step: Step) -> StepRecord:
    for name in step.freeze + step.thaw:
        model.get_parameter(name).requires_grad_(name in step.thaw)
    for kind, rate in enumerate(step.rates):
        for group in engine.optimizer.param_groups:
            if group["kind"] == kind:
                group["lr"] = rate
    rank = dist.get_rank()
    batches = build_batches(case, index)[rank]
    outcome = engine.step(batches, stop=step.stop == rank)
    record = StepRecord(outcome.numbers._asdict(), pieces(engine.state_dict()))
    if step.explain and outcome.numbers.overflow:
        report = engine.explain(outcome)
        record.report = {} if report is None else asdict(report)
    if step.evaluate:
        record.evaluation = engine.evaluate(batches)
    if step.explain or step.evaluate:
        record.after = pieces(engine.state_dict())
    return record


# The engine of a case


def _build(case: Case, model: nn.Module) -> tuple[nn.Module, Engine]:
    sharding = ShardingConfig(
        accumulate=case.accumulate,  # type: ignore[arg-type]
        reshard_after_forward=case.reshard_after_forward,
        shard_size=case.shard_size,
    )
    engine = Engine(
        model,
        loss,
        lambda named: _build_optimizer(case.optimizer, list(named)),
        policy=case.policy,
        strategy=case.strategy,
        parallel=ParallelConfig(
            sharding=sharding,
            activation_checkpointing=case.activation_checkpointing,  # type: ignore[arg-type]
        ),
        schedule=(lambda optimizer: _build_schedule(case, optimizer)) if case.schedule else None,
        max_norm=case.max_norm,
        loss_scale=None if case.scale is None else LossScaleConfig(**asdict(case.scale)),
        attribution=case.attribution,
        shard_optimizer=case.shard_optimizer,
        reproducible=case.reproducible,
        on_nonfinite=case.on_nonfinite,
        nominal_weight=case.nominal_weight,
        device="cpu",
    )
    return model, engine


def _build_optimizer(spec: OptimizerSpec, named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    ways = {"fused": {"fused": True}, "foreach": {"foreach": True}, "single": {"foreach": False}}
    options: dict[str, Any] = dict(ways.get(spec.implementation, {}))
    if spec.name == "sgd":
        options |= {"momentum": spec.momentum, "nesterov": spec.nesterov}
    else:
        options |= {"betas": spec.betas, "eps": spec.eps}
    biases = [item for item in named if spec.groups == 2 and item[0].endswith("bias")]
    others = [item for item in named if spec.groups == 1 or not item[0].endswith("bias")]
    groups = [
        {"params": others, "lr": spec.lr, "weight_decay": spec.weight_decay, "kind": 0},
        {"params": biases, "lr": spec.lr / 2, "weight_decay": 0.0, "kind": 1},
    ]
    return kinds[spec.name]([group for group in groups if group["params"]], **options)


def _build_schedule(case: Case, optimizer: torch.optim.Optimizer) -> Any:
    name, number = case.schedule
    schedules = torch.optim.lr_scheduler
    if name == "step":
        return schedules.StepLR(optimizer, int(number), 0.5)
    if name == "exponential":
        return schedules.ExponentialLR(optimizer, number)
    return schedules.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / number))


def _reload(case: Case, model: nn.Module, engine: Engine) -> tuple[nn.Module, Engine]:
    """Continue with a new engine that has different initial weights."""
    fresh = build_model(case, dist.get_rank() + 100)
    fresh, successor = _build(case, fresh)
    # An engine never trains what was frozen when it was built.
    for name, parameter in model.named_parameters():
        fresh.get_parameter(name).requires_grad_(parameter.requires_grad)
    state = engine.state_dict()
    stored = {name: (torch.Size(t.size()), t.dtype) for name, t in state.items()}
    live = successor.prepare_to_load(stored)
    with torch.no_grad():
        for name in sorted(live.keys() & state.keys()):  # the same order on all ranks
            _fill(live[name], state[name])
    successor.load_state_dict(live)
    return fresh, successor


def _fill(live: Tensor, stored: Tensor) -> None:
    """Copy a tensor that may be sharded differently; every rank has to call it."""
    if isinstance(stored, DTensor):
        live.copy_(stored)  # FSDP shards both in the same way
        return
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, pieces({"": stored}))
    whole = assemble(states)[0][""]
    live.copy_(pieces({"": live})[""].of(whole))
