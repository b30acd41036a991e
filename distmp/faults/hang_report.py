"""Report which ranks hang, where, and what the others wait for."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from distmp.distributed.rank_monitor import RankStatus
from distmp.errors import keys_by_value, rank_names

# Number of ranks whose stack is shown.
MAX_SHOWN = 4


class SilentRank(NamedTuple):
    """The process of a rank that does not answer, as seen from another process.

    Attributes:
        host: Name of its machine.
        pid: Its process id, or 0 if unknown.
        doing: The phase of its last heartbeat as text.
        state: Its process state from the kernel, "gone", or "" if unknown (on another machine).
    """

    host: str
    pid: int
    doing: str
    state: str = ""


class HangReport(NamedTuple):
    """The report on a hang.

    Attributes:
        summary: The report in one line.
        text: The full report.
    """

    summary: str
    text: str


# By rank: the answers of those that answered, and those that did not.
Answers = Mapping[int, RankStatus]
Silent = Mapping[int, SilentRank]
# Collectives that have not completed, see `flight_recorder.pending`; and those of some ranks.
Pending = Mapping[str, Sequence[tuple[int, str]]]
PendingByRank = Mapping[int, Pending]
# A collective that a rank has not started, as text, and the ranks that have.
Missing = tuple[str, list[int]]


def report(
    idle: float, answers: Answers, silent: Silent, world_size: int, pending: PendingByRank
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
    summary = f"{f'{rank_names(late)} late' if late else 'all ranks wait'} for {idle:.0f} s"
    lines = [f"no rank has made progress for {idle:.0f} s; ending the run"]
    for rank in late[:MAX_SHOWN]:
        if rank in silent:
            lines.append(_silent(rank, silent[rank], world_size))
        else:
            lines += _late(rank, answers[rank], _missing(rank, answers, pending), world_size)
    if len(late) > MAX_SHOWN:
        lines.append(f"  also late: {rank_names(late[MAX_SHOWN:])}")
    lines += _waiting(waiting)
    oldest = _oldest(pending)
    if not late:
        lines += [
            f"  {_describe(number, name, group)} has not completed on {rank_names(ranks)}"
            for (group, number, name), ranks in oldest.items()
        ]
    has_different = len({(group, number) for group, number, _ in oldest}) < len(oldest)
    lines.append(f"  {_advice(late, silent, answers, has_different=has_different)}")
    return HangReport(summary, "\n".join(lines))


def _late_ranks(answers: Answers, pending: PendingByRank, *, any_silent: bool) -> set[int]:
    """Return the late ranks among those that answered."""
    behind, ahead = _behind_and_ahead(answers)
    waiting = {r for r, a in answers.items() if a.waits_in or a.synchronizes or pending.get(r)}
    if last := behind - ahead:
        return last - waiting if any_silent else last  # they may wait for a silent rank
    return answers.keys() - waiting


def _behind_and_ahead(answers: Answers) -> tuple[set[int], set[int]]:
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


def _started(answers: Answers) -> dict[str, dict[int, int]]:
    """Return the number of collectives that ranks have started, by group and rank."""
    started: dict[str, dict[int, int]] = {}
    for rank, answer in sorted(answers.items()):
        for group, number in answer.started.items():
            started.setdefault(group, {})[rank] = number
    return started


def _missing(rank: int, answers: Answers, pending: PendingByRank) -> list[Missing]:
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
        *textwrap.indent(answer.stack.rstrip("\n"), "      ").splitlines(),
    ]


def _silent(rank: int, process: SilentRank, world_size: int) -> str:
    why = {
        "": "it runs on another machine" if process.pid else "it has not published its process",
        "gone": "its process is gone",
        "stopped": "its process is stopped (SIGSTOP or a debugger); SIGCONT would continue it",
    }.get(
        process.state,
        f"its process ({process.state}) holds the GIL in native code that does not return, and "
        "writes its stack to standard error",
    )
    return (
        f"  rank {rank} of {world_size} on {process.host} is late and does not answer: {why}; "
        f"{f'process {process.pid}, ' if process.pid else ''}last seen in {process.doing}"
    )


def _waiting(waiting: Answers) -> list[str]:
    """Return a line for each place, with the ranks that wait there."""
    by_place = keys_by_value({rank: _waits(answer) for rank, answer in waiting.items()})
    return [
        f"  {rank_names(ranks)} {'waits' if len(ranks) == 1 else 'wait'}{where}"
        for where, ranks in by_place.items()
    ]


def _waits(answer: RankStatus) -> str:
    """Return where a rank waits, and what it does."""
    place = _place(answer)
    named = answer.waits_in and not answer.waits_in.startswith("work.wait")
    started = f", last started {answer.last_started}" if answer.last_started and not named else ""
    return f"{' ' if place else ''}{place}{started}: {answer.doing}"


def _oldest(pending: PendingByRank) -> dict[tuple[str, int, str], list[int]]:
    """Return the ranks whose oldest pending collective of a group is this one, by that."""
    oldest: dict[tuple[str, int, str], list[int]] = {}
    for rank, groups in sorted(pending.items()):
        for group, collectives in groups.items():
            oldest.setdefault((group, *collectives[0]), []).append(rank)
    return oldest


def _advice(late: list[int], silent: Silent, answers: Answers, *, has_different: bool) -> str:
    if not late:
        behind, _ = _behind_and_ahead(answers)
        if behind:
            return (
                "each rank waits for another one in a different group: they do not start the "
                "collectives of their groups in the same order"
            )
        if len({answer.waits_in for answer in answers.values()} - {""}) > 1 or has_different:
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
