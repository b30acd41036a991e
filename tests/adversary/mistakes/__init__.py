"""Mistakes that people make with the public API, by kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

DIFFERENT_CALLS = "ranks that make different calls wait for each other, or gloo ends the process"

Ends = Literal["error", "warning", "right", "either"]


@dataclass(frozen=True)
class Mistake:
    """A change of a script.

    Attributes:
        name: Unique name.
        change: Function that makes the mistake; called on every rank.
        part: The part of the script that it changes; a case has at most one mistake for each part.
        ends: The expected outcome: "error" (of distmp or of the user's code), "warning" (at least
            that), "right" (correct numbers), "either" (an error or correct numbers).
        ranks: Supported numbers of ranks.
        strategies: Supported strategies; empty for all.
        policies: Supported policies; empty for all.
        known: Why the outcome is still different, if it is.
        kind: Kind of the script: "engine", "scaler", "buckets" or "call".
    """

    name: str
    change: Callable[[Any], None]
    part: str
    ends: Ends
    ranks: tuple[int, ...] = (1, 2)
    strategies: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    known: str = ""
    kind: str = "engine"


MISTAKES: dict[str, Mistake] = {}


def mistake(part: str, ends: Ends, **limits: Any) -> Callable[[Callable[[Any], None]], Any]:
    """Register a function as a mistake with this name."""

    def register(change: Callable[[Any], None]) -> Callable[[Any], None]:
        add(change.__name__.replace("_", " "), change, part, ends, **limits)
        return change

    return register


def add(name: str, change: Callable[[Any], None], part: str, ends: Ends, **limits: Any) -> None:
    if name in MISTAKES:
        raise ValueError(f"two mistakes are called {name!r}")
    MISTAKES[name] = Mistake(name, change, part, ends, **limits)


def in_lines(text: str, truth: tuple[str, ...] | None = None) -> Callable[[Any], None]:
    """Return a change that replaces the lines of the loop on every rank.

    Args:
        text: Names of the lines, separated by commas.
        truth: Names of the lines of the reference, if they change.
    """

    def change(script: Any) -> None:
        script.lines = text.split(", ")
        if truth:
            script.truth_lines = truth

    return change


def setting(part: str, ends: Ends, values: Sequence[Any], name: str = "", **limits: Any) -> None:
    """Register a mistake for each value of an argument of the engine."""
    argument = part
    for value in values:
        add(f"{name or argument} = {value!r}", _set(argument, value), part, ends, **limits)


def _set(argument: str, value: Any) -> Callable[[Any], None]:
    def change(script: Any) -> None:
        script.options[argument] = value

    return change
