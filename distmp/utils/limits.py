"""Limits that policies and settings check; settings must not import torch."""

from __future__ import annotations

# Between these a scale and its reciprocal are normal FP32 numbers, so neither becomes 0 or inf.
SMALLEST_LOSS_SCALE, LARGEST_LOSS_SCALE = 2.0**-126, 2.0**126
