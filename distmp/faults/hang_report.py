"""Report which ranks hang, where, and what the others wait for."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from distmp.distributed.rank_status import RankStatus
from distmp.errors import rank_names
from distmp.utils.frames import CALLS

# Number of ranks whose stack is shown.
MAX_SHOWN = 4


class SilentRank(NamedTuple):
    """The process of a rank that does not answer, as seen from another process.

    Attributes:
        host: Name of its machine.
        pid: Its process id, or 0 if unknown.
        doing: The phase of its last heartbeat as text.
        state: Its process state from the kernel, "gone", or "" if unknown (on another machine).
        stack: The stack of its thread, or "" if unavailable.
    """

    host: str
    pid: int
    doing: str
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


# Collectives that have not completed, see `flight_recorder.pending`.
Pending = Mapping[str, Sequence[tuple[int, str]]]
# A collective that a rank has not started, as text, and the ranks that have.
Missing = tuple[str, list[int]]


def report(
    idle: float,
    answers: Mapping[int, RankStatus],
    silent: Mapping[int, SilentRank],
    world_size: int,
    pending: Mapping[int, Pending],
) -> HangReport:
    """Build the report from the answers of all ranks.

    A rank is late if it does not answer, or if others have started a collective that it has not
    started, and it waits for none of them. If there is no such rank, those are late that wait for
    nothing while others wait.

    Args:
        idle: Seconds since a rank last made progress.
        answers: The answers of the ranks that answered.
        silent: The ranks that did not answer.
        world_size: Number of ranks.
        pending: The pending collectives of the ranks that answered; some ranks may be missing.
    """
    late = sorted(silent.keys() | _late_ranks(answers, pending, any_silent=bool(silent)))
    waiting = {rank: answer for rank, answer in sorted(answers.items()) if rank not in late}
    missing = {
        rank: _missing(rank, answers, pending) for rank in late[:MAX_SHOWN] if rank in answers
    }
    late_summary, waiting_summary = _late_summary(late, missing), _waiting_summary(waiting, late)
    summary = f"{late_summary} for {idle:.0f} s; {waiting_summary}"
    lines = [f"no rank has made progress for {idle:.0f} s; ending the run"]
    for rank in late[:MAX_SHOWN]:
        if rank in silent:
            lines += _silent(rank, silent[rank], world_size)
        else:
            lines += _late(rank, answers[rank], missing[rank], world_size)
    if len(late) > MAX_SHOWN:
        lines.append(f"  also late: {rank_names(late[MAX_SHOWN:])}")
    lines += _waiting(waiting)
    if not late:
        lines += _incomplete(pending)
    lines.append(f"  {_advice(late, silent, answers, pending)}")
    return HangReport(summary, "\n".join(lines))


def _late_ranks(
    answers: Mapping[int, RankStatus], pending: Mapping[int, Pending], *, any_silent: bool
) -> set[int]:
    """Return the late ranks among those that answered."""
    behind, ahead = _behind_and_ahead(answers)
    waiting = {rank for rank, answer in answers.items() if _waits(answer, pending.get(rank))}
    if last := behind - ahead:
        return last - waiting if any_silent else last  # they may wait for a silent rank
    return answers.keys() - waiting


def _waits(answer: RankStatus, pending: Pending | None) -> bool:
    return bool(answer.waits_in or answer.synchronizes or pending)


def _behind_and_ahead(answers: Mapping[int, RankStatus]) -> tuple[set[int], set[int]]:
    """Return the ranks that others wait for in some group, and those that wait for others.

    A rank waits for those that have started fewer collectives of a group. With NCCL
    only the device waits, and the host may be in any call.
    """
    behind: set[int] = set()
    ahead: set[int] = set()
    for started in _started(answers).values():
        least, most = min(started.values()), max(started.values())
        behind.update(rank for rank, number in started.items() if number < most)
        ahead.update(rank for rank, number in started.items() if number > least)
    return behind, ahead


def _started(answers: Mapping[int, RankStatus]) -> dict[str, dict[int, int]]:
    """Return the number of collectives that ranks have started, by group and rank."""
    started: dict[str, dict[int, int]] = {}
    for rank, answer in sorted(answers.items()):
        for group, number in answer.started.items():
            started.setdefault(group, {})[rank] = number
    return started


def _missing(
    rank: int, answers: Mapping[int, RankStatus], pending: Mapping[int, Pending]
) -> list[Missing]:
    """Return the next collective of a rank in each group in which others have started it."""
    missing = []
    for group, started in _started(answers).items():
        number = started.get(rank, max(started.values())) + 1
        ranks = [other for other, count in started.items() if count >= number]
        if ranks:
            shown = [dict(pending[r].get(group, ())) for r in ranks if r in pending]
            name = next((names[number] for names in shown if number in names), "")
            missing.append((_describe(number, name, group), ranks))
    return missing


def _describe(number: int, name: str, group: str) -> str:
    return f"collective {number} of {group}{f', {name}' if name else ''}"


def _late_summary(late: list[int], missing: Mapping[int, list[Missing]]) -> str:
    if not late:
        return "all ranks wait"
    first = missing.get(late[0]) if len(late) == 1 else None
    return f"{rank_names(late)} late{f' before {first[0][0]}' if first else ''}"


def _waiting_summary(waiting: Mapping[int, RankStatus], late: list[int]) -> str:
    if not waiting:
        return "no rank waits in a collective"
    places = sorted({place for answer in waiting.values() if (place := _place(answer))})
    who = rank_names(waiting) if late else "they"
    verb = "waits" if late and len(waiting) == 1 else "wait"
    return f"{who} {' and '.join(places) or verb}"


def _place(answer: RankStatus) -> str:
    if answer.waits_in:
        return f"in {answer.waits_in}"
    return f"for the device in {answer.synchronizes}" if answer.synchronizes else ""


def _late(rank: int, answer: RankStatus, missing: list[Missing], world_size: int) -> list[str]:
    place = _place(answer)
    return [
        f"  rank {rank} of {world_size} on {answer.host} is late: {answer.doing} for "
        f"{answer.idle:.0f} s{f', waiting {place}' if place else ''}",
        *(
            f"    it has not started {collective}, which {rank_names(ranks)} "
            f"{'has' if len(ranks) == 1 else 'have'} started"
            for collective, ranks in missing
        ),
        *_indented(answer.stack),
    ]


def _silent(rank: int, process: SilentRank, world_size: int) -> list[str]:
    why = {
        "": "it runs on another machine" if process.pid else "it has not published its process",
        "gone": "its process is gone",
        "stopped": "its process is stopped (SIGSTOP or a debugger); SIGCONT would continue it",
    }.get(
        process.state,
        f"its process ({process.state}) holds the GIL in native code that does not return",
    )
    return [
        f"  rank {rank} of {world_size} on {process.host} is late and does not answer: {why}; "
        f"{f'process {process.pid}, ' if process.pid else ''}last seen in {process.doing}",
        *_indented(process.stack),
    ]


def _waiting(waiting: Mapping[int, RankStatus]) -> list[str]:
    """Return a line for each place, with the ranks that wait there."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank, answer in waiting.items():
        named = answer.waits_in and not answer.waits_in.startswith("work.wait")
        started = (
            f", last started {answer.last_started}" if answer.last_started and not named else ""
        )
        groups.setdefault((_place(answer), started, answer.doing), []).append(rank)
    lines = []
    for (place, started, doing), ranks in groups.items():
        verb = "waits" if len(ranks) == 1 else "wait"
        lines.append(
            f"  {' '.join(filter(None, (rank_names(ranks), verb, place)))}{started}: {doing}"
        )
    return lines


def _incomplete(pending: Mapping[int, Pending]) -> list[str]:
    """Return a line for the oldest collective of each group that has not completed."""
    oldest: dict[tuple[str, int, str], list[int]] = {}
    for rank, groups in sorted(pending.items()):
        for group, collectives in groups.items():
            oldest.setdefault((group, *collectives[0]), []).append(rank)
    return [
        f"  {_describe(number, name, group)} has not completed on {rank_names(ranks)}"
        for (group, number, name), ranks in oldest.items()
    ]


def _advice(
    late: list[int],
    silent: Mapping[int, SilentRank],
    answers: Mapping[int, RankStatus],
    pending: Mapping[int, Pending],
) -> str:
    if not late:
        behind, _ = _behind_and_ahead(answers)
        if behind:
            return (
                "each rank waits for another one in a different group: they do not start the "
                "collectives of their groups in the same order"
            )
        if len({answer.waits_in for answer in answers.values()} - {""}) > 1 or _differ(pending):
            return "ranks wait in different collectives: they do not run the same code"
        if all(answer.waits_in for answer in answers.values()):
            return "every rank has reached it: check the network between the machines"
        return (
            "all ranks have started the same collectives and wait for the device: check the GPUs "
            "(nvidia-smi, dmesg) and the network between the machines"
        )
    if any(process.state == "stopped" for process in silent.values()):
        return "find out what stopped the process; the others had to wait for it"
    return (
        "if the work is slow and does not hang, set a larger watchdog_seconds (and timeout_minutes)"
    )


def _differ(pending: Mapping[int, Pending]) -> bool:
    """Return whether ranks have started different collectives under the same number."""
    names: dict[tuple[str, int], str] = {}
    return any(
        names.setdefault((group, number), name) != name
        for groups in pending.values()
        for group, collectives in groups.items()
        for number, name in collectives
    )


def _indented(stack: str) -> list[str]:
    return textwrap.indent(stack.rstrip("\n"), "      ").splitlines()


# An unused real-time signal. Its handler also works while other code holds the GIL.
SIGNAL = signal.SIGRTMAX - 5
ANSWER_SECONDS = 2.0


class SharedStack:
    """Lets another process of this machine read the stacks of this one, even if it is blocked.

    Attributes:
        descriptor: Descriptor of a file in memory, to which `SIGNAL` writes the stacks.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("stacks")
        faulthandler.register(SIGNAL, file=self.descriptor, all_threads=True)

    def close(self) -> None:
        """Stop answering."""
        faulthandler.unregister(SIGNAL)
        os.close(self.descriptor)


def of_process(pid: int, descriptor: int) -> str:
    """Return the stack of another process on this machine, or "" if it does not answer.

    Args:
        pid: Id of a process with a `SharedStack`.
        descriptor: The descriptor of that `SharedStack`.
    """
    path = Path(f"/proc/{pid}/fd/{descriptor}")
    with contextlib.suppress(OSError):
        os.kill(pid, SIGNAL)
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            _, heading, text = path.read_text().partition("Current thread ")
            if heading and "\n" in text:
                # Python 3.10 to 3.14 write a heading, a line for each call, and an empty line.
                lines = text.split("\n\n")[0].splitlines()[1:]
                return "".join(f"{line}\n" for line in reversed(lines[:CALLS]))
            time.sleep(0.05)
    return ""
