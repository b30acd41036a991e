from __future__ import annotations

import inspect
import multiprocessing.util
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.ranks import in_turn, ranks, run_ranks


@pytest.mark.parametrize("world_size", [1, 3])
@ranks()
def test_body_runs_on_every_rank(world_size: int, tmp_path: Path) -> None:
    assert dist.get_world_size() == world_size == int(os.environ["WORLD_SIZE"])
    assert dist.get_rank() == int(os.environ["RANK"]) == int(os.environ["LOCAL_RANK"])
    assert torch.get_num_threads() == 1
    assert tmp_path.is_dir()
    total = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(total)
    assert total == world_size * (world_size + 1) / 2


def test_values_are_taken_in_turn() -> None:
    seen: list[tuple[object, ...]] = []

    @in_turn(("first", "second"), [(1, 2), (3, 4)])
    @in_turn("third", ["a", "b"])
    def body(path: str, first: int, second: int, third: str) -> None:
        seen.append((path, first, second, third))

    assert [*inspect.signature(body).parameters] == ["path"]
    body(path="p")  # type: ignore[call-arg]
    assert seen == [("p", 1, 2, "a"), ("p", 1, 2, "b"), ("p", 3, 4, "a"), ("p", 3, 4, "b")]


class TestMethods:
    @ranks(2)
    def test_class_methods_run_on_ranks(self) -> None:
        assert dist.get_world_size() == 2


def _rank_and_tensor(offset: int) -> tuple[int, torch.Tensor]:
    time.sleep(0.2 * (1 - dist.get_rank()))  # the last rank is done first
    return dist.get_rank() + offset, torch.full((300_000,), dist.get_rank(), dtype=torch.bfloat16)


def test_results_come_in_rank_order() -> None:
    results = run_ranks(_rank_and_tensor, 2, 10)
    assert [number for number, _ in results] == [10, 11]
    assert [float(tensor.float().mean()) for _, tensor in results] == [0.0, 1.0]
    assert results[0][1].dtype == torch.bfloat16


def _first_rank_outlives_its_body() -> bool:
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        time.sleep(0.5)
    return psutil.Process(pids[0]).status() != psutil.STATUS_ZOMBIE


def test_rank_waits_until_all_are_done() -> None:
    assert run_ranks(_first_rank_outlives_its_body, 2) == [True, True]


def _fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ArithmeticError("the first cause")
    dist.barrier()


def test_first_cause_is_shown_without_effects() -> None:
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception) as failure:
        run_ranks(_fail_on_rank_1, 3)
    assert time.monotonic() - start < 5
    message = str(failure.value)
    assert message.startswith("rank 1 of 3 raised")
    assert "in _fail_on_rank_1" in message
    assert message.rstrip().endswith("ArithmeticError: the first cause")


def _assert_wrongly() -> None:
    assert [dist.get_rank()] == [5]


def test_failed_assertion_shows_its_values() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"assert \[0\] == \[5\]"):
        run_ranks(_assert_wrongly, 1)


def _die_on_rank_1(number: int) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
    dist.barrier()


def test_rank_killed_without_message_is_named() -> None:
    with pytest.raises(pytest.fail.Exception, match="rank 1 of 2 died of signal SIGKILL"):
        run_ranks(_die_on_rank_1, 2, signal.SIGKILL)


def _hang_on_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(100)


def test_hanging_rank_is_ended_and_named() -> None:
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception) as failure:
        run_ranks(_hang_on_rank_0, 2, timeout=3)
    assert time.monotonic() - start < 8
    message = str(failure.value)
    assert message.startswith("no progress for 3 s: rank 0 of 2\n")
    assert "in _hang_on_rank_0" in message
    assert "rank 1" not in message


def _skip_on_rank_1() -> None:
    if dist.get_rank() == 1:
        pytest.skip("needs something")
    dist.barrier()


def test_skip_on_one_rank_skips_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="needs something"):
        run_ranks(_skip_on_rank_1, 2)


def _exit_badly() -> None:
    multiprocessing.util.Finalize(None, os._exit, args=(7,), exitpriority=0)


def test_crash_at_exit_fails_test() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"rank 0 of 1 returned, then .* exit code 7"):
        run_ranks(_exit_badly, 1)


def _processes_of_ranks() -> set[int]:
    descendants = psutil.Process().children(recursive=True)
    return {process.pid for process in descendants if process.ppid() != os.getpid()}


def _own_pid() -> int:
    return os.getpid()


def test_no_process_remains() -> None:
    pids = run_ranks(_own_pid, 2)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(pytest.fail.Exception):
        run_ranks(_hang_on_rank_0, 2, timeout=1)
    assert _processes_of_ranks() == set()


def test_interrupt_ends_all_ranks() -> None:
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(_hang_on_rank_0, 2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert _processes_of_ranks() == set()


def _print_and_environment() -> tuple[str | None, str]:
    sys.stdout.write("spoken by a rank\n")
    return os.environ.get("DISTMP_TEST_VALUE"), os.getcwd()


def test_ranks_get_environment_directory_and_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cwd: Path
) -> None:
    monkeypatch.setenv("DISTMP_TEST_VALUE", "seen")
    assert run_ranks(_print_and_environment, 1, initialize=False) == [("seen", str(cwd))]
    assert "--- output of rank 0 of 1 ---\nspoken by a rank\n" in capsys.readouterr().out
    assert "WORLD_SIZE" not in os.environ


def _not_initialized() -> bool:
    return dist.is_initialized()


def test_test_can_initialize_process_group() -> None:
    assert run_ranks(_not_initialized, 2, initialize=False) == [False, False]


def test_world_size_is_required() -> None:
    def body() -> None: ...

    with pytest.raises(TypeError, match="world_size"):
        ranks()(body)
