"""A value that was worked out, and why it is what it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class ExplainedValue(Generic[T_co]):
    """A value with its reason, for people: the variable it was read from, or a short sentence."""

    value: T_co
    reason: str
