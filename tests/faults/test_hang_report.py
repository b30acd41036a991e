"""The report on a hang: which ranks are late, what the others wait for."""

from __future__ import annotations

import platform
import threading
from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist

from distmp.distributed import flight_recorder, rank_monitor
from distmp.distributed.progress import PhaseTracker
from distmp.distributed.rank_environment import RankEnvironment
from distmp.distributed.rank_monitor import RankStatus
from distmp.distributed.rendezvous_store import HashStore, PrefixStore
from distmp.faults.hang_report import HangReport, Pending, SilentRank, report
from distmp.faults.watchdog import Ending, Watchdog
from tests.ranks import ranks

WORLD = "the default group (nccl)"
STACK = '  File "x.py", line 1\n'


def answer(
    waits_in: str = "",
    collectives: int | dict[str, int] = 7,
    doing: str = "step 3, decision",
    synchronizes: str = "",
) -> RankStatus:
    return RankStatus(
        doing=doing,
        idle=12.0,
        waits_in=waits_in,
        synchronizes=synchronizes,
        started={WORLD: collectives} if isinstance(collectives, int) else collectives,
        last_started="all_reduce",
        stack=STACK,
        host="node1",
    )


def report_on(
    answers: dict[int, RankStatus],
    silent: dict[int, SilentRank] | None = None,
    traces: Mapping[int, Pending] | None = None,
) -> HangReport:
    silent = silent or {}
    traces = {rank: {} for rank in answers} if traces is None else traces
    return report(12.0, answers, silent, len(answers) + len(silent), traces)


def pending(first: int, *names: str, group: str = WORLD) -> Pending:
    return {group: list(enumerate(names, first))}


WAITS = answer("all_reduce (all_reduce_stats, decision.py:1)")
# With NCCL, the host waits for the device, or runs code that is not recognized as waiting.
READS = answer(synchronizes="synchronize (read, host_copy.py:42)")
ELSEWHERE = answer(doing="step 3, update")


def test_rank_outside_collectives_is_late() -> None:
    result = report_on({0: WAITS, 1: answer(doing="step 3, loading data"), 2: WAITS})
    assert result.summary == "rank 1 late for 12 s"
    assert "rank 1 of 3 on node1 is late: step 3, loading data for 12 s\n" in result.text
    assert 'File "x.py", line 1' in result.text
    assert (
        "ranks 0, 2 wait in all_reduce (all_reduce_stats, decision.py:1): step 3, decision"
        in result.text
    )


def test_rank_in_earlier_collective_is_late() -> None:
    result = report_on({0: WAITS, 1: answer("broadcast (begin, x.py:2)", collectives=6)})
    assert (
        "rank 1 of 2 on node1 is late: step 3, decision for 12 s, waiting in broadcast"
        in result.text
    )


def test_ranks_in_different_collectives_are_reported_as_diverged() -> None:
    result = report_on({0: WAITS, 1: answer("broadcast (begin, x.py:2)")})
    assert "is late" not in result.text
    assert "they do not run the same code" in result.text


def test_all_ranks_in_same_collective_blame_network() -> None:
    result = report_on({0: WAITS, 1: WAITS})
    assert "check the network" in result.text
    assert result.summary == "all ranks wait for 12 s"


def test_report_shows_few_of_many_late_ranks() -> None:
    result = report_on({0: WAITS} | {rank: answer() for rank in range(1, 9)})
    assert result.text.count("File") == 4
    assert "also late: ranks 5-8" in result.text


def test_silent_rank_outside_collective_is_reported() -> None:
    result = report_on({0: WAITS}, {1: SilentRank("node7", 99, "step 3")})
    assert (
        "rank 1 of 2 on node7 is late and does not answer: it runs on another machine; process 99"
        in result.text
    )


@pytest.mark.parametrize("host", [READS, ELSEWHERE])
def test_rank_one_collective_behind_is_late(host: RankStatus) -> None:
    """No host waits in a collective: the numbers of the collectives determine the late rank."""
    behind = answer(collectives=6, doing="step 3, forward of microbatch 1")
    ahead = pending(7, "all_reduce")
    result = report_on(
        {0: host, 1: host, 2: behind, 3: host}, traces={0: ahead, 1: ahead, 2: {}, 3: ahead}
    )
    assert result.text.count("is late") == 1
    assert (
        "  rank 2 of 4 on node1 is late: step 3, forward of microbatch 1 for 12 s\n"
        f"    it has not started collective 7 of {WORLD}, all_reduce, "
        "which ranks 0-1, 3 have started\n"
        '        File "x.py", line 1\n'
    ) in result.text
    assert result.summary == "rank 2 late for 12 s"


def test_report_shows_where_others_wait_for_device() -> None:
    text = report_on({0: READS, 1: answer(collectives=6), 2: READS}).text
    assert (
        "  ranks 0, 2 wait for the device in synchronize (read, host_copy.py:42), "
        "last started all_reduce: step 3, decision\n"
    ) in text


def test_rank_waiting_for_device_may_be_late() -> None:
    """It cannot know that the others have started one more collective."""
    behind = answer(collectives=6, synchronizes="item (f, x.py:1)")
    result = report_on({0: ELSEWHERE, 1: behind})
    assert (
        "rank 1 of 2 on node1 is late: step 3, decision for 12 s, waiting for the device in item"
        in (result.text)
    )
    assert "which rank 0 has started" in result.text
    assert "  rank 0 waits, last started all_reduce: step 3, update\n" in result.text


def test_only_last_of_ranks_behind_is_late() -> None:
    counts = {0: 57, 1: 41, 2: 42}
    names = pending(41, *["all_reduce"] * 1, "all_gather", "broadcast")
    result = report_on(
        {rank: answer(collectives=count) for rank, count in counts.items()},
        traces={0: names, 1: {}, 2: {}},
    )
    assert "rank 1 of 3 on node1 is late" in result.text
    assert result.text.count("is late") == 1
    assert f"collective 42 of {WORLD}, all_gather, which ranks 0, 2 have started" in result.text


def test_missing_collective_name_is_omitted() -> None:
    result = report_on({0: ELSEWHERE, 1: answer(collectives=6)}, traces={})
    assert f"it has not started collective 7 of {WORLD}, which rank 0 has started" in result.text


@pytest.mark.parametrize("host", [READS, answer(doing="step 3, update")])
def test_ranks_with_equal_numbers_wait_for_device(host: RankStatus) -> None:
    traces = {rank: pending(6, "all_gather", "all_reduce") for rank in range(4)}
    result = report_on(dict.fromkeys(range(4), host), traces=traces)
    assert "is late" not in result.text
    assert result.summary == "all ranks wait for 12 s"
    assert f"  collective 6 of {WORLD}, all_gather has not completed on ranks 0-3\n" in result.text
    assert "all ranks have started the same collectives and wait for the device" in result.text


def test_rank_in_user_code_is_late() -> None:
    sleeps = answer(doing="step 3, loading data")
    result = report_on({0: READS, 1: sleeps, 2: READS})
    assert "rank 1 of 3 on node1 is late: step 3, loading data" in result.text
    assert result.text.count("is late") == 1
    assert report_on({0: sleeps, 1: sleeps}).text.count("is late") == 2


def test_last_rank_in_chain_of_waits_is_late() -> None:
    """Rank 0 waits for rank 2, which waits for rank 3: 2 is behind in one group, but not late."""
    rows = {rank: f"group {1 + rank // 2} (nccl)" for rank in range(4)}
    columns = {rank: f"group {3 + rank % 2} (nccl)" for rank in range(4)}
    counts = {0: (9, 5), 1: (9, 5), 2: (9, 4), 3: (8, 4)}
    answers = {
        rank: answer(collectives={WORLD: 3, rows[rank]: row, columns[rank]: column})
        for rank, (row, column) in counts.items()
    }
    traces = {
        0: pending(5, "all_reduce", group=columns[0]),
        1: pending(5, "all_reduce", group=columns[1]),
        2: pending(9, "all_gather", group=rows[2]),
        3: {},
    }
    result = report_on(answers, traces=traces)
    assert result.text.count("is late") == 1
    assert "rank 3 of 4 on node1 is late" in result.text
    assert "collective 9 of group 2 (nccl), all_gather, which rank 2 has started" in result.text
    assert "collective 5 of group 4 (nccl), all_reduce, which rank 1 has started" in result.text


def test_groups_used_in_different_orders_are_reported() -> None:
    answers = {0: answer(collectives={"a": 2, "b": 1}), 1: answer(collectives={"a": 1, "b": 2})}
    traces = {0: pending(2, "all_reduce", group="a"), 1: pending(2, "all_reduce", group="b")}
    result = report_on(answers, traces=traces)
    assert "is late" not in result.text
    assert "do not start the collectives of their groups in the same order" in result.text


def test_different_collectives_with_same_number_are_reported() -> None:
    traces = {0: pending(7, "all_reduce"), 1: pending(7, "broadcast")}
    result = report_on({0: ELSEWHERE, 1: ELSEWHERE}, traces=traces)
    assert "they do not run the same code" in result.text


def test_equal_numbers_of_different_groups_are_distinguished() -> None:
    traces = {
        0: pending(7, "all_reduce", group="a"),
        1: pending(7, "broadcast", group="b"),
    }
    result = report_on({0: ELSEWHERE, 1: ELSEWHERE}, traces=traces)
    assert "all ranks have started the same collectives" in result.text


def test_stopped_process_is_reported_as_cause() -> None:
    silent = {1: SilentRank("node7", 99, "step 3"), 2: SilentRank("node6", 98, "step 3", "stopped")}
    result = report_on({0: READS}, silent)
    assert "find out what stopped the process" in result.text


def test_ranks_waiting_for_silent_rank_are_not_late() -> None:
    """Its numbers are unknown. A rank that waits for nothing is also late."""
    silent = {1: SilentRank("node7", 99, "step 3")}
    waits = answer(collectives=6, synchronizes="item (f, x.py:1)")
    result = report_on({0: READS, 2: waits}, silent)
    assert "rank 1 of 3 on node7 is late and does not answer" in result.text
    assert result.text.count("is late") == 1
    result = report_on({0: READS, 2: answer(collectives=6)}, silent)
    assert result.summary == "ranks 1-2 late for 12 s"


def ask(watchdog: Watchdog) -> None:
    """Ask all ranks because they hang."""
    watchdog._put("hang", True)
    watchdog._store.add("questions", 1)


def alone(rank: int = 0, world_size: int = 1, store: HashStore | None = None) -> Watchdog:
    environment = RankEnvironment(rank, rank, world_size, world_size)
    phase = PhaseTracker()
    watchdog = Watchdog(store or HashStore(), environment, 1, 1)
    watchdog._phase, watchdog._interval = phase, 0.05
    return watchdog


def collective_that_rank_2_does_not_start(group: dist.ProcessGroup) -> dist.Work | None:
    dist.all_reduce(torch.ones(3), group=group)
    dist.all_reduce(torch.ones(3))
    started = [None, None, None]
    dist.all_gather_object(started, "ready", group=group)
    if dist.get_rank() == 2:
        return None
    return dist.all_reduce(torch.ones(5), async_op=True)


@ranks(3)
def test_late_rank_is_found_without_host_in_collective() -> None:
    """As with NCCL, the hosts have started their collectives and run other code."""
    group = dist.new_group(backend="gloo")
    work = collective_that_rank_2_does_not_start(group)
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    watchdog = Watchdog(PrefixStore("peers", store), RankEnvironment(rank, rank, 3, 3), 100, 100)
    ask(watchdog)
    thread = threading.Thread(target=watchdog._answer)
    thread.start()
    while thread.is_alive():  # the main thread is in no collective
        thread.join(0.01)
    # Read before rank 2 goes on, which completes the collective.
    is_named = bool(flight_recorder.pending()) or rank == 2
    found = watchdog.collect("answer", range(3), 60)
    answers = {other: RankStatus(**status) for other, status in found.items()}
    traces = watchdog.collect("pending", range(3), 60)
    assert not any(one.waits_in for one in answers.values())
    result = report(9.0, answers, {}, 3, traces)
    dist.barrier(group=group)
    assert f"rank 2 of 3 on {platform.node()} is late" in result.text
    assert result.text.count("is late") == 1
    name = ", all_reduce" if is_named else ""
    number = answers[0].started["the default group (gloo)"]
    assert (
        f"it has not started collective {number} of the default group (gloo){name}, "
        "which ranks 0-1 have started"
    ) in result.text
    if dist.get_rank() == 2:
        dist.all_reduce(torch.ones(5))
    elif work is not None:
        work.wait()


def test_failing_recorder_does_not_stop_report(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        assert watchdog.collect("answer", [0], 0), "a recorder that blocks must not stop the answer"
        raise RuntimeError("no dump")

    monkeypatch.setattr(flight_recorder, "pending", fail)
    watchdog = alone()
    ask(watchdog)
    watchdog._answer()
    watchdog._answer()
    assert watchdog.collect("pending", [0], 0) == {0: {}}
    assert caplog.messages == ["no flight recorder of rank 0: RuntimeError: no dump"]


def test_only_rank_with_used_device_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_monitor, "device_wait", lambda _: "item (f, x.py:1)")
    watchdog = alone()
    for is_initialized, waits in ((False, ""), (True, "item (f, x.py:1)")):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)  # noqa: B023
        assert watchdog.status().synchronizes == waits


@pytest.mark.parametrize("world_size", [1, 2])
def test_unresponsive_rank_is_reported_once(
    world_size: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other ranks see that one rank reports."""
    endings: list[Ending] = []
    store = HashStore()
    reporting, other = alone(0, world_size, store), alone(0, world_size, store)
    for watchdog in (reporting, other):
        monkeypatch.setattr(watchdog, "_exit", endings.append)
    reporting._report_hang()
    other.rank = 1
    other._report_hang()
    assert [ending.rank for ending in endings] == [0]
    text = capsys.readouterr().err
    assert text.count("does not answer") == world_size - 1
    assert text.count("last seen in startup, before its first heartbeat") == world_size - 1


def test_reporting_rank_waits_for_recorders_of_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    has_looked = threading.Event()

    def pending() -> dict[str, list[tuple[int, str]]]:
        if threading.current_thread() is watchdogs[1]._thread:
            has_looked.wait(60)  # the reporting rank has to look again
            return {WORLD: [(7, "all_reduce")]}
        return {}

    def look(key: str) -> object:
        entry = read(key)
        if key == "pending/1":
            has_looked.set()
        return entry

    monkeypatch.setattr(flight_recorder, "pending", pending)
    store = HashStore()
    watchdogs = [alone(rank, 2, store) for rank in (0, 1)]
    read = watchdogs[0]._read
    monkeypatch.setattr(watchdogs[0], "_read", look)
    # It waits for a number of intervals, which have to be long on a busy machine.
    watchdogs[0]._interval = 15
    endings: list[Ending] = []
    for watchdog in watchdogs:
        monkeypatch.setattr(watchdog, "_exit", endings.append)
    watchdogs[1].watch()
    watchdogs[0]._report_hang()
    watchdogs[1].stop()
    assert [ending.rank for ending in endings] == [0]
    assert "  rank 1 waits: setup\n" in capsys.readouterr().err, "its pending collective is known"
