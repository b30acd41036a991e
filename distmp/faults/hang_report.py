"""Report which ranks hang, where, and what the others wait for."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import NamedTuple

from distmp.errors import rank_names
from distmp.faults.peers import Answer, Status

# Number of ranks whose stack is shown.
MAX_SHOWN = 4


class SilentRank(NamedTuple):
    """The process of a rank that does not answer, as seen from another process.

    Attributes:
        host: Name of its machine.
        pid: Its process id, or 0 if unknown.
        state: Its process state from the kernel, "gone", or "" if unknown (on another machine).
        stack: The stack of its thread, or "" if unavailable.
    """

    host: str
    pid: int
    state: str = ""
    stack: str = ""


class HangReport(NamedTuple):
    """The report on a hang.

    Attributes:
        summary: The report in one line.
        text: The full report.
    """

    summary: str
    text: str


def report(
    statuses: Mapping[int, Status],
    answers: Mapping[int, Answer],
    silent: Mapping[int, SilentRank],
    world_size: int,
) -> HangReport:
    """Build the report from the answers of all ranks.

    A rank is late if it does not answer, if it is in no collective while others wait in one, or if
    it has started fewer collectives than others.

    Args:
        statuses: The last heartbeat of every running rank, with `idle` until now.
        answers: The answers of the ranks that answered.
        silent: The ranks that did not answer.
        world_size: Number of ranks.
    """
    most = max((answer.collectives for answer in answers.values()), default=-1)
    waiting = {
        rank: answer
        for rank, answer in answers.items()
        if answer.waits_in and answer.collectives in (-1, most)
    }
    late = [rank for rank in sorted(statuses) if rank not in waiting]
    idle = min(status.idle for status in statuses.values())
    summary = f"{_late_summary(late)} for {idle:.0f} s; {_waiting_summary(waiting, late)}"
    lines = [f"no rank has made progress for {idle:.0f} s; ending the run"]
    for rank in late[:MAX_SHOWN]:
        if rank in silent:
            lines += _silent(rank, statuses[rank], silent[rank], world_size)
        else:
            lines += _late(rank, answers[rank], world_size)
    if len(late) > MAX_SHOWN:
        lines.append(f"  also late: {rank_names(late[MAX_SHOWN:])}")
    lines += _waiting(waiting)
    lines.append(f"  {_advice(late, silent, waiting)}")
    return HangReport(summary, "\n".join(lines))


def _late_summary(late: list[int]) -> str:
    return f"{rank_names(late)} late" if late else "all ranks wait"


def _waiting_summary(waiting: Mapping[int, Answer], late: list[int]) -> str:
    places = sorted({answer.waits_in for answer in waiting.values()})
    if not places:
        return "no rank waits in a collective"
    return f"{rank_names(waiting) if late else 'they'} in {' and '.join(places)}"


def _late(rank: int, answer: Answer, world_size: int) -> list[str]:
    where = f", waiting in {answer.waits_in}" if answer.waits_in else ""
    return [
        f"  rank {rank} of {world_size} is late: {answer.doing} for {answer.idle:.0f} s{where}",
        *_indented(answer.stack),
    ]


def _silent(rank: int, status: Status, process: SilentRank, world_size: int) -> list[str]:
    why = {
        "": f"it runs on {process.host}",
        "gone": "its process is gone",
        "stopped": "its process is stopped (SIGSTOP or a debugger); SIGCONT would continue it",
    }.get(
        process.state,
        f"its process ({process.state}) holds the GIL in native code that does not return",
    )
    return [
        f"  rank {rank} of {world_size} is late and does not answer: {why}; process {process.pid}, "
        f"last seen in {status.doing}",
        *_indented(process.stack),
    ]


def _waiting(waiting: Mapping[int, Answer]) -> list[str]:
    """Return a line for each collective, with the ranks that wait in it."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank, answer in sorted(waiting.items()):
        groups.setdefault((answer.waits_in, answer.doing, answer.last), []).append(rank)
    lines = []
    for (place, doing, last), ranks in groups.items():
        started = f", last started {last}" if place.startswith("work.wait") and last else ""
        verb = "waits" if len(ranks) == 1 else "wait"
        lines.append(f"  {rank_names(ranks)} {verb} in {place}{started}: {doing}")
    return lines


def _advice(
    late: list[int], silent: Mapping[int, SilentRank], waiting: Mapping[int, Answer]
) -> str:
    if not late:
        places = {answer.waits_in for answer in waiting.values()}
        if len(places) > 1:
            return "ranks wait in different collectives: they do not run the same code"
        return "every rank has reached it: check the network between the machines"
    if any(process.state == "stopped" for process in silent.values()):
        return "find out what stopped the process; the others had to wait for it"
    return (
        "if the work is slow and does not hang, set a larger watchdog_seconds (and timeout_minutes)"
    )


def _indented(stack: str) -> list[str]:
    return textwrap.indent(stack.rstrip("\n"), "      ").splitlines()
