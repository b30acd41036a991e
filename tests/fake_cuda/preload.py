"""Installs the fake device when it is imported, which has to happen before torch is.

FAKE_CUDA_DEVICES sets the number of devices.
"""

from __future__ import annotations

import os
import sys

from tests.fake_cuda import library

assert "torch" not in sys.modules, "the fake device has to be loaded before torch"
_loaded = library.load()

from tests.fake_cuda import device  # noqa: E402

device.install(int(os.environ.setdefault("FAKE_CUDA_DEVICES", "4")), _loaded)
