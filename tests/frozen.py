"""Freezes the objects of this process: no garbage collection looks at them, here or after a fork.

The server of ranks imports this last, and pytest after it has collected the tests. Otherwise each
rank would soon collect the garbage of torch's modules, and would copy their memory.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
