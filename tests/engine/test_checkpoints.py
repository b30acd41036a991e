"""`Engine.save`, `Engine.load` and `Engine.export` in a user's loop."""

from __future__ import annotations

import copy
import logging
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from distmp.checkpoint import saving, storage
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.checkpoint.storage import INDEX_FILE
from distmp.data.dataloader import DataLoader
from distmp.distributed.failing_together import Ranks
from distmp.engine import checkpoints
from distmp.engine.average import WeightAverage
from distmp.engine.checkpoints import OPTIMIZER, OWN_NUMBERS
from distmp.engine.engine import Engine
from distmp.engine.settings import EmaConfig
from distmp.errors import CheckpointError, ConfigError, DistmpError, TrainingError
from distmp.export.weights import load_weights
from distmp.train import main
from tests.checkpoint import listing
from tests.checkpoint.sealing import seal
from tests.parallel.sharding import sharded
from tests.ranks import in_turn, ranks, run_ranks
from tests.reference import (
    ONE_RANK,
    TWO_RANKS,
    adamw,
    assert_same_bits,
    error,
    fused_adamw,
    loss,
    make_engine,
    make_model,
    plain_training,
    snapshot,
    train,
    weights,
)
from tests.torchrun import TINY, corpus, python, run

KINDS: dict[str, dict[str, Any]] = {
    "ddp, fp16": {"strategy": "ddp", "policy": "fp16"},
    "sharded optimizer": {"strategy": "ddp", "policy": "bf16", "shard_optimizer": True},
    "fsdp": {**sharded("fsdp"), "policy": "bf16"},
}
STEPS = 3


@ranks(2, timeout=120)
def test_a_loop_continues_with_the_same_bits(tmp_path: Path) -> None:
    for kind, options in KINDS.items():
        directory = tmp_path / kind.replace(", ", "-")
        engine = make_engine(**options)
        train(engine, STEPS, TWO_RANKS)
        path = engine.save(directory / "blocking", {"epoch": 2, "samples": 96})
        engine.save(directory / "background", {"epoch": 2, "samples": 96}, wait=False)
        saved = snapshot(engine)
        train(engine, STEPS, TWO_RANKS, first=STEPS)
        engine.wait_for_save()
        assert path == directory / "blocking" / "step-000003"
        for way in ("blocking", "background"):
            other = make_engine(**options)
            assert other.load(directory / way) == {"step": 3, "epoch": 2, "samples": 96}
            assert_same_bits(snapshot(other), saved)
            train(other, STEPS, TWO_RANKS, first=STEPS)
            assert_same_bits(snapshot(other), snapshot(engine))
    for other_kind in KINDS.values():  # the weights and moments of any kind load into any other
        other = make_engine(**other_kind)
        other.load(tmp_path / "fsdp" / "blocking")
        again = {k: v for k, v in snapshot(other).items() if not k.startswith("loss_scale/")}
        assert_same_bits(again, {name: saved[name] for name in again})


@ranks(2)
def test_position_of_loader_is_saved_among_the_numbers(tmp_path: Path) -> None:
    engine, loader = make_engine(strategy="ddp"), DataLoader(list(range(12)), 4, 2)
    train(engine, STEPS, TWO_RANKS)
    first = [batch.tolist() for (batch,) in loader]
    assert next(iter(loader))
    engine.save(tmp_path, {"loader": loader.state_dict()})
    expected = [batch.tolist() for (batch,) in loader]
    resumed = DataLoader(list(range(12)), 4, 2)
    resumed.load_state_dict(make_engine(strategy="ddp").load(tmp_path)["loader"])
    assert [batch.tolist() for (batch,) in resumed] == expected
    assert (len(first), len(expected), resumed.epoch) == (3, 2, 2)


@pytest.mark.parametrize("policy", ["fp32", "bf16-autocast", "fp16-autocast"])
def test_optimizer_state_of_another_loop_continues(policy: str) -> None:
    model = nn.Linear(4, 2, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    inputs = 0.1 + 0.1 * torch.rand(8, 4)

    def step_of_torch(inputs: torch.Tensor) -> None:
        model(inputs).sum().div(8).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step_of_torch(inputs)
    engine = Engine(
        copy.deepcopy(model),
        lambda module, batch: (module(batch).float().sum(), len(batch)),
        lambda named: torch.optim.AdamW(named, lr=0.1, fused=True),
        policy=policy,
        device="cpu",
    )
    engine.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not engine.step([-inputs]).numbers.skipped
    step_of_torch(-inputs)  # with new moments, the update would have the opposite sign
    torch.testing.assert_close(engine.module.weight, model.weight, rtol=0, atol=1e-3)


@pytest.mark.parametrize("to_channels_last", [True, False])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_optimizer_state_in_another_memory_format_continues(
    optimizer_class: type[torch.optim.Optimizer], to_channels_last: bool
) -> None:
    formats = [torch.contiguous_format, torch.channels_last]
    before, after = formats if to_channels_last else reversed(formats)
    options = {"lr": 0.01} | ({"momentum": 0.9} if optimizer_class is torch.optim.SGD else {})
    model = nn.Conv2d(3, 4, 2).to(memory_format=before)  # type: ignore[call-overload]
    optimizer = optimizer_class(model.parameters(), **options)
    images = torch.randn(6, 3, 5, 5)

    def step_of_torch() -> None:
        optimizer.zero_grad()
        model(images).square().sum().div(6).backward()
        optimizer.step()

    step_of_torch()
    engine = Engine(
        copy.deepcopy(model).to(memory_format=after),
        lambda module, batch: (module(batch).square().sum(), len(batch)),
        lambda named: optimizer_class(named, **options, fused=True),
        policy="fp32",
        device="cpu",
    )
    engine.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(3):
        step_of_torch()
        engine.step([images])
    torch.testing.assert_close(engine.module.weight, model.weight, rtol=0, atol=1e-5)


def _weights_on_one_rank(directory: Path) -> dict[str, Any]:
    engine = make_engine(strategy="single", policy="fp32")
    numbers = engine.load(directory)
    train(engine, 1, ONE_RANK, first=numbers["step"])
    return {"numbers": numbers, "weights": weights(engine)}


def _weights_on_two_ranks(directory: Path) -> dict[str, Any]:
    engine = make_engine(**KINDS["fsdp"] | {"policy": "fp32"})
    train(engine, STEPS, TWO_RANKS)
    engine.save(directory)
    train(engine, 1, TWO_RANKS, first=STEPS)
    return {"weights": weights(engine)}


def test_another_number_of_ranks_continues(tmp_path: Path) -> None:
    first, *_ = run_ranks(_weights_on_two_ranks, 2, tmp_path)
    (found,) = run_ranks(_weights_on_one_rank, 1, tmp_path)
    assert found["numbers"] == {"step": STEPS}
    for name, expected in first["weights"].items():
        torch.testing.assert_close(found["weights"][name], expected, rtol=1e-5, atol=1e-6)


# Errors


def _disk_full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


@ranks(2)
def test_a_failed_save_is_raised_once_on_all_ranks_by_the_next_call(tmp_path: Path) -> None:
    engine = make_engine(strategy="ddp")
    train(engine, 1, TWO_RANKS)
    cause = r"cannot save .*step-000001: rank 1: OSError: \[Errno 28\] No space left on device"
    with pytest.MonkeyPatch.context() as monkeypatch:
        if dist.get_rank() == 1:
            monkeypatch.setattr(FileSystemWriter, "write_data", _disk_full)
        with pytest.raises(CheckpointError, match=cause):
            engine.save(tmp_path)
        for surfacing in (
            engine.wait_for_save,
            lambda: engine.save(tmp_path),
            lambda: engine.load(tmp_path),
        ):
            engine.save(tmp_path, wait=False)
            with pytest.raises(CheckpointError, match=cause):
                surfacing()
    engine.wait_for_save()
    engine.save(tmp_path, wait=False)
    engine.wait_for_save()
    assert make_engine(strategy="ddp").load(tmp_path) == {"step": 1}


@ranks(2)
def test_a_save_that_fails_on_one_rank_alone_reports_its_cause(tmp_path: Path) -> None:
    engine = make_engine(strategy="ddp")
    gather, calls = Ranks.gather, []

    def gather_or_fail(ranks: Ranks, value: Any) -> list[Any]:
        """Fail in the last exchange of a save on rank 1, for which rank 0 then waits."""
        if value == (None, None):  # of a rank that waits for the work of rank 0
            calls.append(value)
            if len(calls) == 2:
                raise RuntimeError("no route to host")
        return gather(ranks, value)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(checkpoints, "TIMEOUT_SECONDS", 2.0)
        monkeypatch.setattr(Ranks, "gather", gather_or_fail)
        engine.save(tmp_path, wait=False)
        cause = r"cannot save .*: RuntimeError: no route to host"
        with pytest.raises(CheckpointError, match=cause):
            engine.wait_for_save()


@ranks(2)
def test_unsavable_values_are_named(tmp_path: Path) -> None:
    engine = make_engine(strategy="ddp")
    rank = dist.get_rank()
    for numbers, message in (
        ({"position": rank}, "numbers['position'] = 0 on rank 0; 1 on rank 1: differs"),
        ({"by_id": {1: 2}}, "numbers = {'by_id': {1: 2}}: would load as {'by_id': {'1': 2}}"),
        ({"shape": (1, 2)}, "numbers = {'shape': (1, 2)}: would load as {'shape': [1, 2]}"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            engine.save(tmp_path, numbers)
    for numbers in ({"loss": torch.ones(1)}, [1]):
        message = r"numbers = .*1.*: cannot be stored \(.*\); pass a dict of numbers"
        with pytest.raises(ConfigError, match=message):
            engine.save(tmp_path, numbers)  # type: ignore[arg-type]
    with pytest.raises(DistmpError, match="keep = 0"):
        engine.save(tmp_path, keep=rank)  # raised on rank 1, too
    with pytest.raises(
        ConfigError, match=r"directory = .*0 on rank 0; .*1 on rank 1: differs betw"
    ):
        engine.save(tmp_path / str(rank))
    with pytest.raises(ConfigError, match="wait = True on rank 0; False on rank 1: differs betw"):
        engine.save(tmp_path, wait=not rank)
    with pytest.raises(ConfigError, match=r"keep = 0: use 1 or more checkpoints"):
        engine.save(tmp_path, keep=0)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ConfigError, match=r"directory = .*missing.* does not exist"):
        engine.load(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"directory = 'auto': .* does not exist"):
        engine.load("auto")
    assert engine.load(tmp_path / "missing", missing_ok=True) == {"step": 0}
    with pytest.raises(
        ConfigError, match=r"directory = .*0 on rank 0; .*1 on rank 1: differs betw"
    ):
        engine.load(tmp_path / str(rank), missing_ok=True)
    wrong = engine.state_dict() | {"model/module.bias": torch.ones(1)}
    reshaped = engine.state_dict() | {"model/head.weight": torch.ones(1)}
    for state, problem in (
        (engine.weights(), "lacks model/"),
        (wrong, "has the unknown model/mod"),
        (reshaped, r"lacks model/head\.weight \[5, 12\]"),
    ):
        with pytest.raises(
            ConfigError, match=rf"^state = .* tensors': {problem}.*; pass engine.st"
        ):
            engine.export(tmp_path / "average", state)
    assert not (tmp_path / "average").exists()
    (tmp_path / "ckpt").write_text("")
    with pytest.raises(ConfigError, match=r"ckpt is not a checkpoint and contains none"):
        engine.load(tmp_path / "ckpt", missing_ok=True)
    with pytest.raises(CheckpointError, match=r"cannot save .*ckpt.*File exists"):
        engine.save(tmp_path / "ckpt")


class Counting(torch.optim.Optimizer):
    """Counts in its groups and, as older optimizers do, in Python numbers per parameter."""

    def __init__(self, named: Any, lr: float = 0.1) -> None:
        defaults = {"lr": lr, "k": 0, "betas": (0.9, 0.5), "weight_decay": 0.01}
        super().__init__(named, defaults | {"shares": [0.9, 0.5], "t": torch.zeros(1)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["betas"] = (0.9, group["betas"][1] / 3)
            group["shares"][1] /= 3
            group["t"] += 1
            group.setdefault("d", 1e-30)
            group["d"] *= 1.1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state["rms"] = 0.3 * state.get("rms", 1.0)
                factor = state["rms"] / state["step"] + group["betas"][1] / group["k"]
                factor += group["shares"][1] / group["t"].item()
                parameter.sub_(parameter.grad, alpha=group["lr"] * factor)


def test_numbers_that_an_optimizer_keeps_are_saved(tmp_path: Path) -> None:
    engine = make_engine(optimizer=Counting)
    train(engine, 3, ONE_RANK)
    engine.save(tmp_path)
    state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    train(engine, 2, ONE_RANK, first=3)
    for load in (lambda other: other.load(tmp_path), lambda other: other.load_state_dict(state)):
        for steps in (0, 1):  # a new engine, and one that returns to the state
            other = make_engine(optimizer=Counting)
            other.optimizer.param_groups[0]["weight_decay"] = 0.02
            train(other, steps, ONE_RANK)
            load(other)
            assert type(other.optimizer.param_groups[0]["k"]) is int
            assert type(other.optimizer.param_groups[0]["shares"]) is list
            assert other.optimizer.param_groups[0]["weight_decay"] == 0.01
            train(other, 2, ONE_RANK, first=3)
            assert_same_bits(weights(other), weights(engine))
            assert other.optimizer.param_groups[0]["d"] == engine.optimizer.param_groups[0]["d"]


def test_a_new_optimizer_starts_with_its_own_numbers(tmp_path: Path) -> None:
    engine = make_engine(optimizer=Counting)
    train(engine, 2, ONE_RANK)
    engine.save(tmp_path)
    engine.load(tmp_path, optimizer=False)
    assert engine.optimizer.param_groups[0]["k"] == 0
    assert not any(name.endswith("#number") for name in engine.state_dict())


def test_numbers_of_the_configuration_are_those_of_the_resumed_run(tmp_path: Path) -> None:
    engine = make_engine(optimizer=lambda named: torch.optim.AdamW(named, weight_decay=0.1))
    train(engine, 1, ONE_RANK)
    engine.save(tmp_path)
    other = make_engine(optimizer=lambda named: torch.optim.AdamW(named, weight_decay=0.2))
    other.load(tmp_path)
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.2


def test_extra_state_of_a_model_is_refused_unless_a_tensor() -> None:
    class Extra(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"k": 1}

        def set_extra_state(self, state: Any) -> None:
            """Nothing."""

    engine = make_engine(model=Extra(4, 4))
    with pytest.raises(CheckpointError, match="get_extra_state of the model returns a dict"):
        engine.state_dict()


class Calls(nn.Module):
    """A model whose extra state is a number, which `get_extra_state` returns as a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.part = make_model(), nn.Linear(1, 1)
        self.part.requires_grad_(False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.model(x)

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.calls)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.calls = int(state)


@ranks(2)
@in_turn("strategy", ["ddp", "fsdp"])
def test_extra_state_is_set_by_a_load(tmp_path: Path, strategy: str) -> None:
    engine = make_engine(model=Calls(), strategy=strategy)
    train(engine, 1, TWO_RANKS)
    calls = engine.model.calls
    assert calls > 0
    engine.save(tmp_path / strategy)
    engine.export(tmp_path / f"{strategy} weights")
    state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    for load in (lambda: engine.load(tmp_path / strategy), lambda: engine.load_state_dict(state)):
        engine.model.calls = 0
        load()
        assert engine.model.calls == calls
    load_weights(model := Calls(), tmp_path / f"{strategy} weights")
    assert model.calls == calls


@ranks(2)
def test_shards_of_another_rank_are_refused() -> None:
    engine = make_engine(strategy="ddp", shard_optimizer=True)
    average = WeightAverage(engine, EmaConfig(0.5))
    own = engine.state_dict(), engine.weights()
    others, weights_of_others = (Ranks(None).gather(part)[1 - engine.world.rank] for part in own)
    before = {name: value.clone() for name, value in own[0].items()}
    for load, values in (
        (engine.load_state_dict, others),
        (average.load, weights_of_others),
    ):
        with pytest.raises(CheckpointError, match=r"is the elements \d+ to .* in the state"):
            load(values)
    assert_same_bits(engine.state_dict(), before)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".PT"])
def test_a_directory_that_is_named_like_a_file_is_refused(tmp_path: Path, suffix: str) -> None:
    engine = make_engine()
    path = tmp_path / f"model{suffix}"
    for write in (engine.save, engine.export):
        for directory in (path, str(path), f"{path}/"):
            with pytest.raises(ConfigError) as error:
                write(directory)
            assert str(error.value) == (
                f"directory = '{directory}': names a directory, not a file; "
                f"use a name without {suffix!r}"
            )
    assert not [*tmp_path.iterdir()]
    engine.save(tmp_path / "v1.2")  # another dot


@pytest.mark.parametrize("size", [-5, 0, True, 2.5, "5GB"])
def test_a_size_of_files_that_is_not_positive_is_refused(tmp_path: Path, size: Any) -> None:
    message = rf"max_shard_size = {size!r}: use a positive number of bytes, such as 500 \* 10\*\*6"
    with pytest.raises(ConfigError, match=message):
        make_engine().export(tmp_path / "weights", max_shard_size=size)
    assert not [*tmp_path.iterdir()]


class Wider(nn.Module):
    """Has the parameters of the reference model, and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()
        self.scale = nn.Parameter(torch.ones(1))


def _expanded(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
    total, weight = loss(model.inner, batch)
    return total * model.scale.sum(), weight


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    engine = make_engine()
    train(engine, 2, ONE_RANK)
    wider = Engine(Wider(), _expanded, fused_adamw, policy="fp32", device="cpu")
    train(wider, 1, ONE_RANK)
    wider.save(tmp_path / "wider")
    before = snapshot(engine)
    with pytest.raises(CheckpointError, match=r"it does not fit: there is no .model/first\.weight"):
        engine.load(tmp_path / "wider")
    assert_same_bits(snapshot(engine), before)
    state = StoredCheckpoint(tmp_path / "wider" / "step-000001")
    more = engine.state_dict() | {"model/scale": torch.ones(1)}
    saving.save(tmp_path / "more", 2, more, {"step": 2}, keep=1)
    with pytest.raises(CheckpointError, match=r"holds model/scale, which this model does not hav"):
        engine.load(tmp_path / "more")
    assert_same_bits(snapshot(engine), before)
    described = {"model": None, OPTIMIZER: ["AdamW", "Adam"]}
    assert state.state.numbers == {"step": 1, OWN_NUMBERS: {}, **described}


@pytest.mark.parametrize("kernel", ["fused", "foreach"])
def test_sgd_that_gains_momentum_continues_as_in_torch(
    kernel: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class GainsMomentum(torch.optim.SGD):
        updates = 0

        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["momentum"] = 0.9 if self.updates >= 2 else 0.0
            self.updates += 1
            super().step(closure)

    def engine(momentum: float) -> Engine:
        options: dict[str, Any] = {"momentum": momentum, kernel: True}
        return make_engine(optimizer=lambda named: torch.optim.SGD(named, lr=0.1, **options))

    before, after = engine(0.0), engine(0.9)
    train(before, 2, ONE_RANK)
    before.save(tmp_path)
    train(after, 1, ONE_RANK)  # the momentum of this step is dropped
    after.load(tmp_path)
    assert ("the state has no optimizer state of " in caplog.text) == (kernel == "fused")
    train(after, 3, ONE_RANK, first=2)
    expected, _ = plain_training(5, ONE_RANK, lambda p: GainsMomentum(p, lr=0.1))
    assert error(weights(after), expected) < 1e-5


def test_state_without_what_an_option_needs_names_what_to_do(tmp_path: Path) -> None:
    engine = make_engine()
    train(engine, 1, ONE_RANK)
    engine.save(tmp_path)
    other = make_engine(optimizer=lambda named: adamw(named, amsgrad=True))
    with pytest.raises(CheckpointError) as caught:
        other.load(tmp_path)
    assert str(caught.value) == (
        "the state has no max_exp_avg_sq of first.weight, which amsgrad = True needs; set it "
        "(optim.options in the trainer) as in the saved optimizer, or load only the weights: "
        "engine.load(directory, optimizer=False), or in the trainer a new run with model.weights, "
        "from `distmp export`"
    )
    other.load(tmp_path, optimizer=False)
    assert_same_bits(weights(other), weights(engine))


def test_the_state_of_another_optimizer_is_refused_or_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    train(engine, 2, ONE_RANK)
    path = engine.save(tmp_path)
    other = make_engine(optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9))
    caplog.clear()
    before = snapshot(other)
    with pytest.raises(ConfigError) as caught:
        other.load(tmp_path)
    assert str(caught.value) == (
        f"directory = {str(path)!r}: has the state of the optimizer AdamW, and this engine has "
        "SGD; continue with AdamW, or with its weights only: engine.load(directory, "
        "optimizer=False), or in the trainer a new run with model.weights, from `distmp export`"
    )
    assert_same_bits(snapshot(other), before)
    assert other.load(tmp_path, optimizer=False) == {"step": 2}
    assert other.optimizer.param_groups[0]["lr"] == 0.1
    assert_same_bits(weights(other), weights(engine))
    # The classes share their state.
    adam = make_engine(optimizer=lambda named: torch.optim.Adam(named, lr=0.1, fused=True))
    adam.load(tmp_path)
    assert_same_bits(snapshot(adam), snapshot(engine))
    train(other, 1, ONE_RANK, first=2)
    assert not any("exp_avg" in name for name in other.state_dict())
    assert [record for record in caplog.records if record.name == "distmp"] == []


def _save_on_rank_0(directory: Path) -> str:
    engine = make_engine(strategy="ddp")
    train(engine, 1, TWO_RANKS)
    call = engine.evaluate if dist.get_rank() else engine.save
    with pytest.raises(TrainingError) as error:
        call(directory)
    return str(error.value)


def test_a_save_on_rank_0_only_is_refused(tmp_path: Path) -> None:
    first, _ = run_ranks(_save_on_rank_0, 2, tmp_path)
    assert "rank 0 waits in engine.save(), which every rank has to call" in first
    assert not [*tmp_path.iterdir()]


SCRIPT = """
import errno, torch, distmp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

write = FileSystemWriter.write_data

def full_disk(self, *args, **kwargs):
    if "full" in str(self.path):
        raise OSError(errno.ENOSPC, "No space left on device")
    return write(self, *args, **kwargs)

FileSystemWriter.write_data = full_disk
for directory in ("full", "saved"):
    engine = distmp.Engine(torch.nn.Linear(4, 2), lambda m, b: (m(b).square().sum(), len(b)),
                           lambda named: torch.optim.SGD(named, lr=0.1), policy="fp32")
    engine.step([torch.ones(3, 4)])
    engine.save(directory, wait=False)
del engine
"""


@pytest.mark.nightly
def test_the_end_of_the_process_waits_for_saves(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    result = run(python("script.py"), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("/full/step-000001: OSError") == 1, result.stderr
    assert result.stderr.count("NOT SAVED") == 1
    engine = make_engine(model=nn.Linear(4, 2), optimizer=_sgd)
    assert engine.load(tmp_path / "full", missing_ok=True) == {"step": 0}
    assert engine.load(tmp_path / "saved") == {"step": 1}


def _sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def test_save_of_a_deleted_engine_is_finished_before_its_directory_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, prepare, write = threading.Event(), storage.prepare, FileSystemWriter.write_data

    def prepare_next(directory: Path, step: int) -> Path:
        path = prepare(directory, step)
        if step == 2:
            prepared.set()
        return path

    def write_later(*args: Any, **options: Any) -> Any:
        prepared.wait(0.5)
        return write(*args, **options)

    monkeypatch.setattr(storage, "prepare", prepare_next)
    monkeypatch.setattr(FileSystemWriter, "write_data", write_later)
    for directory in (tmp_path / "saved", tmp_path / "loaded"):
        prepared.clear()
        engine = make_engine()
        train(engine, 1, ONE_RANK)
        engine.save(directory, wait=False)
        del engine
        other = make_engine()
        if directory.name == "loaded":
            assert other.load(directory) == {"step": 1}
        train(other, 2, ONE_RANK)
        other.save(directory)
        assert 1 in listing.checkpoints(directory)


def test_the_tensors_of_another_step_are_refused(tmp_path: Path) -> None:
    engine = make_engine()
    paths = []
    for step in (1, 2):
        train(engine, 1, ONE_RANK, first=step - 1)
        paths.append(engine.save(tmp_path))
    for name in ("__0_0.distcp", INDEX_FILE):
        shutil.copyfile(paths[0] / name, paths[1] / name)
    seal(paths[1])
    with pytest.raises(CheckpointError, match="its tensors are of step 1, not 2"):
        engine.load(paths[1])


# Directories, as other programs name them


@pytest.mark.parametrize("name", ["step-{:06d}", "epoch{}"])
def test_directory_of_a_step_can_be_loaded(name: str, tmp_path: Path) -> None:
    engine = make_engine()
    states = {}
    for step in (1, 2):
        train(engine, 1, ONE_RANK, first=step - 1)
        engine.save(tmp_path / name.format(9 + step))
        states[step] = snapshot(engine)
    other = make_engine()
    for directory, step in (
        (tmp_path / name.format(10), 1),
        (tmp_path / name.format(10) / "step-000001", 1),
        (tmp_path / name.format(11), 2),
    ):
        assert other.load(directory) == {"step": step}
        assert_same_bits(snapshot(other), states[step])
    with pytest.raises(ConfigError, match="is not a checkpoint and contains none"):
        other.load(tmp_path)
    engine.save(tmp_path, keep=1)  # leaves the directories alone
    assert other.load(tmp_path / name.format(10)) == {"step": 1}


def test_the_latest_checkpoints_are_kept_and_damaged_ones_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    for step in range(4):
        train(engine, 1, ONE_RANK, first=step)
        engine.save(tmp_path / "two")
        engine.save(tmp_path / "all", keep=None)
    engine.save(tmp_path / "two", {"again": True})  # the same step is replaced
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == ["step-000003", "step-000004"]
    assert len([*(tmp_path / "all").iterdir()]) == 4
    assert make_engine().load(tmp_path / "two") == {"step": 4, "again": True}
    next((tmp_path / "two" / "step-000004").glob("*.distcp")).write_bytes(b"")
    with caplog.at_level(logging.WARNING, logger="distmp"):
        assert make_engine().load(tmp_path / "two") == {"step": 3}
    assert any("has 0 bytes" in message for message in caplog.messages)
    with pytest.raises(ConfigError, match="is not a checkpoint and contains none"):
        make_engine().load(tmp_path)  # 'two' and 'all' may be two models


# The trainer


def test_the_trainer_and_a_loop_load_each_others_checkpoints(
    cwd: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = [*TINY, f"--data.path={corpus(cwd / 'corpus')}", "--log.console=plain"]
    assert main([*arguments, "--steps=2", "--run-dir=run"]) == 0
    from distmp.config import load
    from distmp.distributed.world import World
    from distmp.training.components import build_engine, build_model_and_data

    config = load(arguments)
    world = World.current("cpu")
    engine = build_engine(
        config, build_model_and_data(config, world), world, policy="fp32", attribution=False
    )
    numbers = engine.load("run")
    assert (numbers["step"], numbers["samples"]) == (2, 16)
    state = snapshot(engine)
    engine.save("loop", {"samples": numbers["samples"]})
    assert main([*arguments, "--steps=2", "--run-dir=again", "--resume=loop"]) == 0
    engine.load("again")
    assert_same_bits(snapshot(engine), state)
    assert main([*arguments, "--steps=3", "--run-dir=more", "--resume=loop"]) == 0
    assert main([*arguments, "--steps=3", "--run-dir=run", "--resume=auto"]) == 0
    assert engine.load("more")["samples"] == 24
    continued = snapshot(engine)
    engine.load("run")
    assert_same_bits(snapshot(engine), continued)
    engine.save("without", {"epoch": 1})
    assert main([*arguments, "--steps=4", "--resume=without", "--run-dir=no"]) != 0


def test_the_exported_weights_are_the_fp32_ones(tmp_path: Path) -> None:
    engine = make_engine(policy="bf16")
    train(engine, 1, ONE_RANK)
    engine.export(tmp_path / "weights")
    # Not even config.json, which describes models that distmp or transformers builds.
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["model.safetensors"]
    assert_same_bits(load_file(tmp_path / "weights" / "model.safetensors"), weights(engine))
    train(engine, 1, ONE_RANK)
    engine.export(tmp_path / "weights")  # replaces them
    assert_same_bits(load_file(tmp_path / "weights" / "model.safetensors"), weights(engine))
    engine.save(tmp_path / "weights" / "checkpoints")
    for directory in (tmp_path / "weights", tmp_path):
        with pytest.raises(CheckpointError, match="which exported weights would replace; name a n"):
            engine.export(directory)
    assert engine.load(tmp_path / "weights" / "checkpoints") == {"step": 2}


@ranks(1)
def test_numbers_are_those_at_the_time_of_the_save(tmp_path: Path) -> None:
    engine, history = make_engine(), [1]
    engine.save(tmp_path, {"history": history}, wait=False)
    history.append(2)
    engine.wait_for_save()
    assert make_engine().load(tmp_path)["history"] == [1]
