"""Installs the fake device; import it before torch.

FAKE_CUDA_DEVICES sets the number of devices.
"""

from __future__ import annotations

import os
import sys

from tests.fake_cuda import library

assert "torch" not in sys.modules, "import tests.fake_cuda.preload before torch"
_loaded = library.load()

from tests.fake_cuda import device  # noqa: E402

device.install(int(os.environ.setdefault("FAKE_CUDA_DEVICES", "4")), _loaded)
