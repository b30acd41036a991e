from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch.distributed as dist

from distmp.distributed.stopping import (
    CHECK_EVERY,
    StopSignals,
    exit_on_stop_signals,
    restore_handlers,
    stop_requested_on_any_rank,
    until_stop_requested,
)
from tests.ranks import ranks
from tests.torchrun import environment, python

INT, TERM, USR1, USR2 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
HUP = signal.SIGHUP


def send(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        ((), None),
        ((INT,), INT),
        ((TERM,), TERM),
        ((USR1,), USR1),
        ((USR2, TERM), USR2),
        ((TERM, TERM, USR1, USR1), TERM),
        ((TERM, INT), TERM),
    ],
)
def test_first_signal_requests_stop(
    sent: tuple[signal.Signals, ...], received: signal.Signals | None
) -> None:
    with StopSignals() as stop:
        send(*sent)
        assert stop.received == received
    assert stop.received == received


@pytest.mark.parametrize("sent", [(INT,), (INT, TERM), (TERM, INT)])
def test_second_interrupt_raises_keyboard_interrupt(sent: tuple[signal.Signals, ...]) -> None:
    with StopSignals() as stop:
        send(*sent)
        with pytest.raises(KeyboardInterrupt):
            send(INT)
        assert stop.received == sent[0]


@pytest.fixture
def handlers() -> Iterator[list[int]]:
    """Install handlers of other code; return the signals that they receive."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (INT, TERM)}
    yield received
    for number, handler in before.items():
        signal.signal(number, handler)


def test_handlers_are_restored(handlers: list[int]) -> None:
    with StopSignals():
        send(INT, TERM)
    assert handlers == []
    send(INT, TERM)
    assert handlers == [INT, TERM]


def test_signal_of_one_run_does_not_stop_next() -> None:
    with StopSignals():
        with StopSignals():
            send(TERM)
        assert StopSignals.last == TERM
    assert StopSignals.last is None


def test_handlers_are_restored_after_error(handlers: list[int]) -> None:
    with pytest.raises(ArithmeticError), StopSignals():
        raise ArithmeticError
    send(TERM)
    assert handlers == [TERM]


@pytest.mark.parametrize(
    ("before", "launcher", "received"),
    [
        pytest.param(signal.SIG_DFL, None, None, id="a single process continues"),
        pytest.param(signal.SIG_DFL, "torchrun", HUP, id="torchrun would end it"),
        pytest.param(signal.SIG_IGN, "torchrun", None, id="nohup or distmp launch"),
    ],
)
def test_hangup_stops_only_under_torchrun(
    before: signal.Handlers,
    launcher: str | None,
    received: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launcher is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", launcher)
    outside = signal.signal(HUP, before)
    try:
        with StopSignals() as stop:
            send(HUP)
        assert stop.received == received
        assert signal.getsignal(HUP) == before
    finally:
        signal.signal(HUP, outside)


def test_startup_handlers_are_inactive_after_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("ended"))
    numbers = (INT, TERM, USR1, USR2)
    outside = {number: signal.getsignal(number) for number in numbers}
    try:
        exit_on_stop_signals()
        with StopSignals() as stop:
            send(USR1)
        assert stop.received == USR1
        # The exit code of the work counts from now on.
        send(*numbers)
        with StopSignals() as again:
            send(TERM)
        assert again.received == TERM
        send(*numbers)
    finally:
        restore_handlers(outside)


@pytest.mark.parametrize("number", [INT, TERM])
def test_rank_blocked_in_native_code_can_be_ended(number: signal.Signals) -> None:
    """Like a rank that waits for others: no Python handler runs before the call returns."""
    program = f"""
        import ctypes
        from distmp.distributed.stopping import StopSignals, default_signal_handlers
        with StopSignals() as stop:
            with default_signal_handlers():
                pass
            signal.raise_signal({int(number)})
            assert stop.received == {int(number)}
            with default_signal_handlers():
                print("waiting", flush=True)
                ctypes.CDLL(None).sleep(600)
    """
    code = "import signal\n" + textwrap.dedent(program)
    with subprocess.Popen(python("-c", code), env=environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"waiting\n"
        process.send_signal(number)
        assert process.wait(60) == -number


def test_handlers_of_other_code_are_kept() -> None:
    received: list[int] = []
    before = signal.signal(USR1, lambda number, frame: received.append(number))
    try:
        with StopSignals() as stop:
            send(USR1)
        assert (received, stop.received) == ([USR1], None)
    finally:
        signal.signal(USR1, before)


def test_native_handler_of_faulthandler_is_kept(tmp_path: Path) -> None:
    with (tmp_path / "stacks").open("w+") as stacks:
        faulthandler.register(USR1, stacks)
        try:
            with StopSignals() as stop:
                send(USR1)
            send(USR1)
        finally:
            faulthandler.unregister(USR1)
        assert stop.received is None
        assert (tmp_path / "stacks").read_text().count("most recent call first") >= 2


@ranks(2)
def test_all_ranks_stop_at_same_item() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert not stop_requested_on_any_rank(False, group)
    assert stop_requested_on_any_rank(rank == 1, group)
    for questions in (0, 1, 3, 100):
        # `stop_requested` of rank 1 returns True after this many calls.
        answers = iter([*[False] * questions, *[rank == 1] * 10])
        items = until_stop_requested(range(5 * CHECK_EVERY), answers.__next__, group)
        expected = min(questions, 5) * CHECK_EVERY
        assert list(items) == [*range(expected)]
        assert items.ended_early == (questions < 5)


def test_single_process_stops() -> None:
    assert list(until_stop_requested("abc", lambda: False, None)) == ["a", "b", "c"]
    assert list(until_stop_requested("abc", lambda: True, None)) == []
