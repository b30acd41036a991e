from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from distmp.stopping import StopSignals

INT, TERM = signal.SIGINT, signal.SIGTERM


def send(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("sent", "received"),
    [((), None), ((INT,), INT), ((TERM,), TERM), ((TERM, TERM), TERM), ((TERM, INT), TERM)],
)
def test_the_first_signal_is_noted(
    sent: tuple[signal.Signals, ...], received: signal.Signals | None
) -> None:
    with StopSignals() as stop:
        send(*sent)
        assert stop.received == received
    assert stop.received == received


@pytest.mark.parametrize("sent", [(INT,), (INT, TERM), (TERM, INT)])
def test_a_second_interrupt_interrupts(sent: tuple[signal.Signals, ...]) -> None:
    with StopSignals() as stop:
        send(*sent)
        with pytest.raises(KeyboardInterrupt):
            send(INT)
        assert stop.received == sent[0]


@pytest.fixture
def handlers() -> Iterator[list[int]]:
    """Handlers of somebody else; what they receive."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (INT, TERM)}
    yield received
    for number, handler in before.items():
        signal.signal(number, handler)


def test_handlers_are_put_back(handlers: list[int]) -> None:
    with StopSignals():
        send(INT, TERM)
    assert handlers == []
    send(INT, TERM)
    assert handlers == [INT, TERM]


def test_handlers_are_put_back_after_an_error(handlers: list[int]) -> None:
    with pytest.raises(ArithmeticError), StopSignals():
        raise ArithmeticError
    send(TERM)
    assert handlers == [TERM]
