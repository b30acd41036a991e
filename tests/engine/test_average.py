"""The average of the weights, compared with its recurrence in float64 under every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp.engine.average import WeightAverage
from distmp.engine.engine import Engine
from distmp.engine.settings import EmaConfig
from distmp.errors import ConfigError, TrainingError
from distmp.parallel.settings import ParallelConfig, ShardingConfig
from distmp.utils.dtypes import local_values
from tests.ranks import ranks
from tests.reference import (
    FOUR_RANKS,
    ONE_RANK,
    TWO_RANKS,
    Batch,
    assert_same_bits,
    foreach_adamw,
    gathered,
    loss,
    make_engine,
    make_model,
    microbatches,
    snapshot,
    weights,
)

DECAY = 0.7
# Steps with a gradient that is not finite on one rank.
SKIPPED = (1, 4)
CASES: dict[str, dict[str, Any]] = {
    "ddp, fp32": {"strategy": "ddp"},
    "ddp, bf16": {"strategy": "ddp", "policy": "bf16"},
    "ddp, bf16-pure": {"strategy": "ddp", "policy": "bf16-pure"},
    "ddp, the host skips": {"strategy": "ddp", "optimizer": foreach_adamw},
    "sharded optimizer, fp16": {"strategy": "ddp", "policy": "fp16", "shard_optimizer": True},
    "fsdp, fp16": {"strategy": "fsdp", "policy": "fp16"},
    "fsdp, fp32": {"strategy": "fsdp"},
    # Shards of one rank, which each of the two ranks replicates.
    "hsdp, fp16": {
        "strategy": "hsdp",
        "policy": "fp16",
        "parallel": ParallelConfig(ShardingConfig(shard_size=1)),
    },
}


def step(engine: Engine, number: int) -> bool:
    """Take a step, and return whether it was skipped."""
    rank = engine.world.rank
    batches = microbatches(number, TWO_RANKS[0], rank)
    if number in SKIPPED and rank == 1:
        batches[0] = batches[0]._replace(factor=float("inf"))
    return engine.step(batches).numbers.skipped


def check_recurrence(engine: Engine, config: EmaConfig) -> WeightAverage:
    """Train, and compare the average with the recurrence in float64 after each step."""
    average = WeightAverage(engine, config)
    expected = {name: value.double() for name, value in weights(engine).items()}
    skipped = []
    for number in range(7):
        if step(engine, number):
            skipped.append(number)
        else:
            for name, value in weights(engine).items():
                expected[name] = config.decay * expected[name] + (1 - config.decay) * value.double()
        average.update()
        for name, value in gathered(average.values).items():
            assert value.dtype == torch.float32
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-7)
    assert skipped == [*SKIPPED]
    return average


def check_exchange(engine: Engine, average: WeightAverage) -> None:
    """Evaluate with the average, compare with another engine, and check that no bit is left."""
    batches = microbatches(9, TWO_RANKS[0], engine.world.rank)
    before, values = snapshot(engine), gathered(average.values)
    outputs = [engine.evaluate(batches)]
    with average.as_weights():
        outputs.append(engine.evaluate(batches))
    outputs.append(engine.evaluate(batches))
    assert_same_bits(snapshot(engine), before)
    assert_same_bits(gathered(average.values), values)
    assert outputs[0] == outputs[2] != outputs[1]
    reference = make_model().double()
    reference.load_state_dict({name: value.double() for name, value in values.items()})
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        total, weight = loss(reference, batch._replace(inputs=batch.inputs.double()))
        sums += torch.tensor([float(total), float(weight)])
    dist.all_reduce(sums)
    tolerance = 1e-5 if engine.policy.compute_dtype == torch.float32 else 2e-2
    assert outputs[1] == pytest.approx(float(sums[0] / sums[1]), rel=tolerance)
    assert not step(engine, 8)  # training continues


@ranks(2, timeout=150)
def test_the_average_follows_its_recurrence_and_can_be_evaluated() -> None:
    for options in CASES.values():
        engine = make_engine(**options)
        check_exchange(engine, check_recurrence(engine, EmaConfig(DECAY)))


def test_a_save_in_the_background_has_the_weights_and_not_their_average(tmp_path: Path) -> None:
    engine = make_engine(strategy="single")
    average = WeightAverage(engine, EmaConfig(DECAY))
    engine.step(microbatches(0, ONE_RANK[0], 0))
    average.update()
    saved = snapshot(engine)
    engine.save(tmp_path, wait=False)
    with average.as_weights():
        pass
    engine.step(microbatches(1, ONE_RANK[0], 0))
    engine.wait_for_save()
    engine.load(tmp_path)
    assert_same_bits(snapshot(engine), saved)


def test_each_applied_step_counts_once() -> None:
    engine = make_engine(strategy="single")
    average = WeightAverage(engine, EmaConfig(DECAY))
    before = {name: value.clone() for name, value in average.values.items()}
    engine.step(microbatches(0, ONE_RANK[0], 0))
    for _ in range(2):
        average.update()
    for name, value in weights(engine).items():
        expected = DECAY * before[name].double() + (1 - DECAY) * value.double()
        torch.testing.assert_close(average.values[name].double(), expected, rtol=1e-6, atol=1e-7)


def test_a_decay_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ema\.decay = '0\.9': must be a number, not text"):
        EmaConfig("0.9")  # type: ignore[arg-type]


@ranks(4, timeout=150)
def test_the_average_of_replicated_shards_follows_its_recurrence() -> None:
    sharding = ShardingConfig(shard_size=2, accumulate="hybrid")
    engine = make_engine(strategy="hsdp", policy="bf16", parallel=ParallelConfig(sharding))
    average = WeightAverage(engine, EmaConfig(DECAY))
    expected = {name: value.double() for name, value in weights(engine).items()}
    for number in range(3):
        engine.step(microbatches(number, FOUR_RANKS[number], engine.world.rank))
        average.update()
        for name, value in weights(engine).items():
            expected[name] = DECAY * expected[name] + (1 - DECAY) * value.double()
    values = gathered(average.values)
    for name, value in values.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-7)
    before = snapshot(engine)
    with average.as_weights():
        assert_same_bits(weights(engine), values)
    assert_same_bits(snapshot(engine), before)


def test_weights_that_are_replaced_or_trained_behind_the_average_are_an_error(
    tmp_path: Path,
) -> None:
    engine = make_engine(strategy="single")
    engine.step(microbatches(0, ONE_RANK[0], 0))
    engine.save(tmp_path)
    average = WeightAverage(engine, EmaConfig(DECAY))
    engine.load(tmp_path / "none", missing_ok=True)
    average.update()
    engine.load(tmp_path)
    for use in (average.update, average.as_weights().__enter__):
        with pytest.raises(
            TrainingError, match=r"^engine.load.* or a rollback has replaced .* average.restart\(\)"
        ):
            use()
    average.restart()
    average.update()
    assert_same_bits(gathered(average.values), weights(engine))
    engine.load(tmp_path)
    average.load(average.values)
    average.update()
    engine.load_state_dict(snapshot(engine))
    with pytest.raises(TrainingError, match=r"engine.load_state_dict .* has replaced"):
        average.update()
    average.restart()
    with pytest.raises(TrainingError, match=r"^engine\.step inside of"), average.as_weights():
        engine.step(microbatches(1, ONE_RANK[0], 0))


def test_the_average_is_not_stored_updated_or_replaced_while_it_is_in_use(tmp_path: Path) -> None:
    engine = make_engine(strategy="single")
    average = WeightAverage(engine, EmaConfig(DECAY))
    engine.step(microbatches(0, ONE_RANK[0], 0))
    average.update()
    engine.save(tmp_path)
    before, values = snapshot(engine), gathered(average.values)
    with average.as_weights():
        for wait in (True, False):
            with pytest.raises(
                TrainingError, match=r"would have the average in place .* save afte"
            ):
                engine.save(tmp_path / "average", wait=wait)
        for call, use in {
            "update": average.update,
            "restart": average.restart,
            "load": lambda: average.load(average.values),
            "as_weights": average.as_weights().__enter__,
        }.items():
            with pytest.raises(TrainingError, match=rf"^average\.{call}\(\) was called while"):
                use()
    assert_same_bits(snapshot(engine), before)
    assert_same_bits(gathered(average.values), values)
    engine.save(tmp_path / "weights")
    with pytest.raises(TrainingError, match="a state was loaded inside"), average.as_weights():
        engine.load(tmp_path)
    average.restart()
    with pytest.raises(ArithmeticError), average.as_weights():
        raise ArithmeticError
    with pytest.raises(TrainingError, match=r"after an error in it only after engine\.load"):
        average.update()
    engine.load(tmp_path)
    average.restart()
    average.update()


def test_an_average_that_is_never_updated_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine(strategy="single")
    average = WeightAverage(engine, EmaConfig(DECAY))
    with average.as_weights():  # the same as the weights
        pass
    engine.step([microbatches(0, ONE_RANK[0], 0)[0]._replace(factor=float("inf"))])
    with average.as_weights():
        pass
    caplog.clear()
    engine.step(microbatches(0, ONE_RANK[0], 0))
    for _ in range(2):
        with average.as_weights():
            pass
    (message,) = caplog.messages
    assert "average.update() was never called" in message
    for use in (average.restart, average.update, lambda: average.load(average.values)):
        use()
        with average.as_weights():
            pass
    assert caplog.messages == [message]
    engine.step(microbatches(0, ONE_RANK[0], 0))
    with average.as_weights():  # trained since it was loaded
        pass
    assert caplog.messages == [message, message]


def test_values_under_other_names_are_refused() -> None:
    engine = make_engine(strategy="single")
    average = WeightAverage(engine, EmaConfig(DECAY))
    kept = {name: value.clone() for name, value in average.values.items()}
    with pytest.raises(ConfigError, match=r"values = 'model/.*is not the name of a trained param"):
        average.load({f"model/{name}": value + 1 for name, value in kept.items()})
    assert_same_bits(average.values, kept)


def test_an_average_without_a_decay_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^config\.decay = 0\.0: the average would always be"):
        WeightAverage(make_engine(strategy="single"), EmaConfig())


@ranks(2)
def test_decays_that_differ_between_ranks_are_refused() -> None:
    engine = make_engine()
    average = WeightAverage(engine, EmaConfig(0.5 + 0.25 * engine.world.rank))
    message = r"config\.decay = 0\.5 on rank 0; 0\.75 on rank 1: differs between ranks"
    with pytest.raises(ConfigError, match=message), average.as_weights():
        pass
    assert not engine.holds_average


@ranks(2)
def test_a_rank_averages_only_what_it_holds() -> None:
    def held(tensors: dict[str, Tensor]) -> int:
        return sum(local_values(tensor).numel() for tensor in tensors.values())

    whole = sum(parameter.numel() for parameter in make_model().parameters())
    for options in ({"strategy": "fsdp"}, {"strategy": "ddp", "shard_optimizer": True}):
        engine = make_engine(**options)
        average = WeightAverage(engine, EmaConfig(DECAY))
        assert held(average.values) == held(engine.weights()) < 0.7 * whole


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decay": 1.0}, "ema.decay = 1.0: use a number from 0 to below 1, such as 0.999"),
        ({"decay": -0.1}, "ema.decay = -0.1: use a number from 0 to below 1, such as 0.999"),
    ],
)
def test_invalid_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EmaConfig(**values)
    assert str(caught.value) == message


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_average_needs_no_synchronization(policy: str) -> None:
    engine = make_engine(policy=policy, device="cuda", max_norm=1.0)
    average = WeightAverage(engine, EmaConfig(DECAY))
    batches = [
        Batch(batch.inputs.cuda(), batch.labels.cuda(), batch.factor)
        for batch in microbatches(0, ONE_RANK[0])
    ]
    for _ in range(2):  # the first steps allocate
        engine.step(batches)
        average.update()
    expected = {name: value.double() for name, value in average.values.items()}
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.step(batches)
        average.update()
        bad = [batches[0]._replace(factor=float("inf")), *batches[1:]]
        outcome = engine.step(bad)
        average.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert outcome.numbers.skipped
    for name, value in engine.weights().items():
        wanted = DECAY * expected[name] + (1 - DECAY) * value.double()
        torch.testing.assert_close(average.values[name].double(), wanted, rtol=1e-6, atol=1e-7)


def test_teacher_in_16_bits_follows_an_average_in_fp32() -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("student", "teacher")})
    model["teacher"].requires_grad_(False)
    nn.init.ones_(model["teacher"].weight)
    nn.init.ones_(model["student"].weight)
    engine = Engine(
        model,
        lambda module, batch: (-module["student"](batch.bfloat16()).float().sum(), len(batch)),
        lambda named: torch.optim.SGD(named, lr=0.1),
        policy="bf16",
    )
    teacher, rounded = model["teacher"].weight, torch.ones(4, 4, dtype=torch.bfloat16)
    average = WeightAverage(engine, EmaConfig(decay=0.999))
    exact = torch.ones(4, 4, dtype=torch.float64)
    for _ in range(40):
        engine.step([torch.ones(2, 4)])
        average.update()
        student = engine.weights()["student.weight"]
        exact.lerp_(student.double(), 0.001)
        rounded.lerp_(student.bfloat16(), 0.001)
        teacher.copy_(average.values["student.weight"])
    assert teacher.dtype == torch.bfloat16
    torch.testing.assert_close(teacher.double(), exact, rtol=2**-8, atol=0.0)
    assert (exact - rounded.double()).min() > 0.03
