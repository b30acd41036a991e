"""Checks the gradient of anybody's training code against float64; see docs/testing.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distmp._lazy import lazy_names

__all__ = ["AuditReport", "GradientError", "GradientMismatch", "audit", "check_gradient"]

if TYPE_CHECKING:
    from distmp.testing.auditing import AuditReport, audit
    from distmp.testing.check import check_gradient
    from distmp.testing.classify import GradientError, GradientMismatch
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "distmp.testing.auditing": ("AuditReport", "audit"),
            "distmp.testing.check": ("check_gradient",),
            "distmp.testing.classify": ("GradientError", "GradientMismatch"),
        },
    )
