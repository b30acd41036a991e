"""Command `torchrun -m distmp.train --config FILE`: trains as one rank of a job."""

from __future__ import annotations

import faulthandler

from distmp.training.train import end_process, main

__all__ = ["main"]

if __name__ == "__main__":
    # A crash in native code prints where it happened.
    faulthandler.enable()
    end_process(main())
