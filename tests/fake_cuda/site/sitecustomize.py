"""Gives fake devices to processes that tests start: Python runs this first."""

from tests.fake_cuda import preload  # noqa: F401
