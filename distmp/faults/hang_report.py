"""Says which ranks hang, where, and what the others wait for."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from distmp.faults.peers import Answer, Status

# How many ranks are shown with their stack.
SHOWN = 4


class Silence(NamedTuple):
    """A rank that does not answer, seen from outside.

    Attributes:
        host: Its machine.
        pid: Its process; 0: not known.
        state: Of the process as the kernel has it; "": not known, on another machine.
        stack: Of its threads, or "" if it could not be had.
    """

    host: str
    pid: int
    state: str = ""
    stack: str = ""


class HangReport(NamedTuple):
    """What is said.

    Attributes:
        summary: One line.
        text: All of it.
    """

    summary: str
    text: str


def report(
    statuses: Mapping[int, Status],
    answers: Mapping[int, Answer],
    silent: Mapping[int, Silence],
    world_size: int,
) -> HangReport:
    """Put together what ranks have answered.

    Late are the ranks that do not answer, those that are in no collective while others wait in one,
    and those that have started fewer collectives than others.

    Args:
        statuses: The last sign of life of every rank that runs.
        answers: Of the ranks that have answered.
        silent: The other ones.
        world_size: Number of all ranks.
    """
    most = max((answer.collectives for answer in answers.values()), default=-1)
    waiting = {
        rank: answer
        for rank, answer in answers.items()
        if answer.waits_in and answer.collectives in (-1, most)
    }
    late = [rank for rank in sorted(statuses) if rank not in waiting]
    idle = min(status.idle for status in statuses.values())
    summary = f"{_late_in_words(late)} for {idle:.0f} s; {_waiting_in_words(waiting, late)}"
    lines = [f"nothing has moved on any rank for {idle:.0f} s, and the run ends"]
    for rank in late[:SHOWN]:
        if rank in silent:
            lines += _silent(rank, statuses[rank], silent[rank], world_size)
        else:
            lines += _late(rank, answers[rank], world_size)
    if len(late) > SHOWN:
        lines.append(f"  late as well: {_ranks(late[SHOWN:])}")
    lines += _waiting(waiting)
    lines.append(f"  {_advice(late, silent, waiting)}")
    return HangReport(summary, "\n".join(lines))


def _late_in_words(late: list[int]) -> str:
    return f"{_ranks(late)} late" if late else "all ranks wait"


def _waiting_in_words(waiting: Mapping[int, Answer], late: list[int]) -> str:
    places = sorted({answer.waits_in for answer in waiting.values()})
    if not places:
        return "no rank waits in a collective"
    return f"{_ranks(waiting) if late else 'they'} in {' and '.join(places)}"


def _late(rank: int, answer: Answer, world_size: int) -> list[str]:
    where = f", waiting in {answer.waits_in}" if answer.waits_in else ""
    return [
        f"  rank {rank} of {world_size} is late: {answer.doing} for {answer.idle:.0f} s{where}",
        *_indented(answer.stack),
    ]


def _silent(rank: int, status: Status, silence: Silence, world_size: int) -> list[str]:
    why = {
        "": f"it runs on {silence.host}",
        "gone": "its process is gone",
        "stopped": "its process is stopped (SIGSTOP or a debugger); SIGCONT would let it go on",
    }.get(
        silence.state,
        f"its process ({silence.state}) keeps Python's lock, in native code that does not return",
    )
    return [
        f"  rank {rank} of {world_size} is late and does not answer: {why}; process {silence.pid}, "
        f"last seen in {status.doing}",
        *_indented(silence.stack),
    ]


def _waiting(waiting: Mapping[int, Answer]) -> list[str]:
    """Name each collective, with the ranks that wait in it."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank, answer in sorted(waiting.items()):
        groups.setdefault((answer.waits_in, answer.doing, answer.last), []).append(rank)
    lines = []
    for (place, doing, last), ranks in groups.items():
        started = f", last started {last}" if place.startswith("work.wait") and last else ""
        verb = "waits" if len(ranks) == 1 else "wait"
        lines.append(f"  {_ranks(ranks)} {verb} in {place}{started}: {doing}")
    return lines


def _advice(late: list[int], silent: Mapping[int, Silence], waiting: Mapping[int, Answer]) -> str:
    if not late:
        places = {answer.waits_in for answer in waiting.values()}
        if len(places) > 1:
            return "ranks wait in different collectives: they do not run the same code"
        return "every rank has come to it: look at the network between the machines"
    if any(silence.state == "stopped" for silence in silent.values()):
        return "find out who stopped the process; the others had to wait for it"
    return (
        "if this is no hang but takes so long, set a larger watchdog_seconds (and timeout_minutes)"
    )


def _indented(stack: str) -> list[str]:
    return textwrap.indent(stack.rstrip("\n"), "      ").splitlines()


def _ranks(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in ranks]
    return f"rank{'s' * (len(names) > 1)} {', '.join(names)}"
