"""The start and the end of a process that runs a command; imports neither settings nor torch."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from distmp.distributed.stopping import ignore_stop_signals
from distmp.telemetry.console import flush_standard_streams, open_standard_streams


def run_process(command: Callable[[], int]) -> NoReturn:
    """Run a command in a process that has just started, and end with the exit code it returns."""
    open_standard_streams()
    # A crash in native code prints where it happened.
    faulthandler.enable()
    end_process(command())


def end_process(exit_code: int) -> NoReturn:
    """End this rank with an exit code.

    If a failure left the process group initialized, the process ends without running destructors:
    gloo's abort the process if other ranks are gone, which would hide the exit code.
    """
    ignore_stop_signals()
    flush_standard_streams()
    dist = sys.modules.get("torch.distributed")
    if exit_code and dist and dist.is_initialized():
        os._exit(exit_code)
    sys.exit(exit_code)
