"""A derived value together with the reason for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class ExplainedValue(Generic[T_co]):
    """A value and its reason as text: the variable it was read from, or a short phrase."""

    value: T_co
    reason: str
