"""Command `torchrun -m distmp.train --config FILE`: trains as one rank of a job."""

from __future__ import annotations

import faulthandler

from distmp.training.train import end_process, main
from distmp.utils.standard_streams import open_closed

__all__ = ["main"]

if __name__ == "__main__":
    open_closed()
    # A crash in native code prints where it happened.
    faulthandler.enable()
    end_process(main())
