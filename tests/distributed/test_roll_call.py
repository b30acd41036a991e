"""Calls that need all ranks begin when all ranks have made them, or end in an error."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from distmp.distributed import rank_monitor, roll_call
from distmp.distributed.rank_monitor import RankStatus
from distmp.distributed.roll_call import RollCall
from distmp.distributed.world import World
from distmp.errors import LostPeerError, TrainingError
from tests.ended import look_ended
from tests.ranks import in_turn, ranks
from tests.reference import ONE_RANK, TWO_RANKS, make_engine, microbatches, train


def impatient() -> RollCall:
    roll_call.PATIENCE_SECONDS = 0.2
    return RollCall(World.current("cpu"))


@ranks(2)
def test_roll_call_waits_for_late_rank() -> None:
    calls = impatient()
    for number in range(5):
        calls.count("engine.step()")
        if dist.get_rank() == number % 2:
            time.sleep(0.7)
        calls.wait_for_all("engine.evaluate()")
    monitor = rank_monitor.current()
    assert monitor is not None
    left = [n for n in range(1, 11) if monitor._store.check([f"{n}/engine.evaluate()"])]
    assert left == [10]


@ranks(2)
def test_rank_arriving_during_query_is_no_error(tmp_path: Path) -> None:
    calls = impatient()
    monitor = rank_monitor.current()
    assert monitor is not None
    queried, continued = tmp_path / "queried", tmp_path / "continued"
    if dist.get_rank() == 1:
        wait_for(queried)
        calls.wait_for_all("engine.evaluate()")
        calls.count("engine.step()")
        continued.touch()
    else:
        query = monitor.query

        def slow_query(others: Sequence[int]) -> dict[int, RankStatus | None]:
            queried.touch()
            wait_for(continued)
            return query(others)

        with mock.patch.object(monitor, "query", slow_query):
            calls.wait_for_all("engine.evaluate()")
        calls.count("engine.step()")
    calls.wait_for_all("engine.explain()")


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


@ranks(2)
def test_rank_at_other_call_is_named() -> None:
    calls = impatient()
    calls.count("engine.step()")
    if dist.get_rank() == 1:
        calls.count("engine.step()")
        time.sleep(5)  # like a reduction that rank 0 does not join
        return
    with pytest.raises(TrainingError) as raised:
        calls.wait_for_all("engine.evaluate()")
    message = str(raised.value)
    assert message.startswith("rank 0 waits in engine.evaluate(), which every rank has to call, ")
    assert "rank 1 is at " in message
    assert "the last call of its engine was engine.step()" in message


@ranks(2)
def test_ranks_waiting_in_different_calls_both_raise() -> None:
    calls = impatient()
    own, other = ("evaluate", "explain") if dist.get_rank() else ("explain", "evaluate")
    with pytest.raises(TrainingError, match=rf"waits in engine\.{own}\(.*engine\.{other}\(\)"):
        calls.wait_for_all(f"engine.{own}()")
    dist.barrier()


@ranks(2)
def test_roll_call_does_not_wait_for_exited_process() -> None:
    calls = impatient()
    assert rank_monitor.current() is not None
    dist.barrier()
    if dist.get_rank() == 1:
        look_ended()
    dist.barrier()
    if dist.get_rank() == 0:
        cause = rf"rank, 1 on {platform.node()}, has the cause; .* engine\.evaluate\(\) less often"
        with pytest.raises(LostPeerError, match=cause):
            calls.wait_for_all("engine.evaluate()")


@ranks(2)
def test_failed_call_of_one_rank_fails_next_call() -> None:
    roll_call.FAILURE_SECONDS = 0.5
    calls = impatient()
    problem = ValueError("no data")
    calls.check_failed_everywhere("1", problem)
    if dist.get_rank() == 0:
        message = r"failed on rank 0 of 2 \(ValueError: no data\) and not at the same point on ev"
        with pytest.raises(TrainingError, match=message):
            calls.check_failed_everywhere("2", problem)
    dist.barrier()


@ranks(2)
@in_turn("call", ["publish_weights", "load_state_dict"])
def test_calls_wait_for_other_ranks_before_their_collectives(call: str) -> None:
    impatient()
    engine = make_engine(policy="bf16", shard_optimizer=True)
    train(engine, 1, TWO_RANKS)
    calls: dict[str, Any] = {
        "evaluate": lambda: engine.evaluate(microbatches(1, TWO_RANKS[0], dist.get_rank())),
        "publish_weights": engine.publish_weights,
        "load_state_dict": lambda: engine.load_state_dict(engine.state_dict()),
    }
    own, other = (call, "evaluate") if dist.get_rank() else ("evaluate", call)
    with pytest.raises(TrainingError, match=rf"waits in engine\.{own}\(.*engine\.{other}\(\)"):
        calls[own]()
    dist.barrier()


@ranks(2)
def test_steps_that_fail_in_different_microbatches_are_refused() -> None:
    roll_call.FAILURE_SECONDS = 0.5
    engine = make_engine()
    train(engine, 1, TWO_RANKS)
    batches: list[Any] = microbatches(1, TWO_RANKS[0], dist.get_rank())
    for failing in ([0, 0], [0, 1]):  # by rank
        wrong = [*batches]
        wrong[failing[dist.get_rank()]] = None
        with pytest.raises(AttributeError):
            engine.step(wrong)
        if failing == [0, 0]:
            engine.step(batches)
    with pytest.raises(TrainingError, match=r"AttributeError.* not at the same point on every"):
        engine.step(batches)
    dist.barrier()


def test_single_process_needs_no_roll_call() -> None:
    calls = RollCall(World.current("cpu"))
    calls.count("engine.step()")
    calls.wait_for_all("engine.evaluate()")
    engine = make_engine()
    train(engine, 1, ONE_RANK)
    assert engine.evaluate(microbatches(0, ONE_RANK[0])) > 0
