"""Checks the gradient of anybody's training code against float64."""

from distmp.testing.auditing import AuditReport, audit
from distmp.testing.check import check_gradient
from distmp.testing.classify import GradientError, GradientMismatch

__all__ = ["AuditReport", "GradientError", "GradientMismatch", "audit", "check_gradient"]
