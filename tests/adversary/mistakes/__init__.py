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
        name: Unique.
        change: Makes it; called on every rank.
        part: What it changes; a case has one mistake of a part.
        ends: What is known of the outcome: "error" (one message of ours, or of the user's code),
            "warning" (at least that), "right" (numbers), "either" (one of the two).
        ranks: Numbers of ranks that it can be made on.
        strategies: Where it can be made; empty for all.
        policies: Likewise.
        known: Why it ends otherwise as yet.
        kind: Which script it is made in: "engine", "scaler", "buckets" or "call".
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
    """Register a function as a mistake, under its name."""

    def register(change: Callable[[Any], None]) -> Callable[[Any], None]:
        add(change.__name__.replace("_", " "), change, part, ends, **limits)
        return change

    return register


def add(name: str, change: Callable[[Any], None], part: str, ends: Ends, **limits: Any) -> None:
    if name in MISTAKES:
        raise ValueError(f"two mistakes are called {name!r}")
    MISTAKES[name] = Mistake(name, change, part, ends, **limits)


def in_lines(text: str, truth: tuple[str, ...] | None = None) -> Callable[[Any], None]:
    """Return a change that gives the loop of every rank these lines, and perhaps the truth others.

    Args:
        text: Names of the lines, separated by commas.
        truth: Those of the truth.
    """

    def change(script: Any) -> None:
        script.lines = text.split(", ")
        if truth:
            script.truth_lines = truth

    return change


def setting(part: str, ends: Ends, values: Sequence[Any], name: str = "", **limits: Any) -> None:
    """Register an argument of the engine with each of some values."""
    argument = part
    for value in values:
        add(f"{name or argument} = {value!r}", _set(argument, value), part, ends, **limits)


def _set(argument: str, value: Any) -> Callable[[Any], None]:
    def change(script: Any) -> None:
        script.options[argument] = value

    return change
