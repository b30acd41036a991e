"""A pytest plugin that runs tests on fake devices: `pytest -p tests.fake_cuda.plugin -m gpu`.

Each test runs once, with every operation as late as possible. Its operations are then replayed in
other orders that streams, events and waits allow. Every value that the host reads must be bitwise
equal. Processes that a test starts see the devices too.

The devices need a CPU build of torch; with a CUDA build, tests run as without the plugin.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_cuda import library

SITE = str(Path(__file__).with_name("site"))

if library.fits():
    from tests.fake_cuda import preload  # noqa: F401  (before torch)
    from tests.fake_cuda.replaying import replayed

    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if SITE not in paths:
        root = str(Path(__file__).parents[2])
        os.environ["PYTHONPATH"] = os.pathsep.join([SITE, root, *filter(None, paths)])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
        """Replay the operations of the test and its ranks, unless it is marked `not_replayed`."""
        with pytest.MonkeyPatch.context() as patch:
            if item.get_closest_marker("not_replayed") is not None:
                patch.setenv("FAKE_CUDA_SCHEDULES", "none")
            with replayed():
                return (yield)
