"""Opens standard streams that were closed when the process started."""

from __future__ import annotations

import os
import sys


def open_closed() -> None:
    """Open closed standard streams on the null device (`command >&-`, and some daemons).

    Otherwise the next file that this process opens gets the number of the stream, and everything
    that is printed goes to that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    # Python sets a closed stream to None. They stay open until the process ends.
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
