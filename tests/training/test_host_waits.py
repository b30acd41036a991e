"""Between validations and saves, the host of a run waits for nothing but the step before.

The trainer runs on a fake CUDA device, which counts waits, see `tests/fake_cuda`.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from distmp.train import main
from distmp.training.callbacks import Callback
from tests.torchrun import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.not_replayed,
    pytest.mark.skipif("FAKE_CUDA_DEVICES" not in os.environ, reason="needs fake CUDA devices"),
]

VALIDATED, SAVED, STEPS = 5, 8, 10
MICROBATCHES = 8  # of a validation


class Waits(Callback):
    """Counts what the host asks of the device from the beginning of each step to the next."""

    def __init__(self) -> None:
        self.by_step: dict[int, Any] = {}
        self.read_at_once: list[int] = []

    def on_step_begin(self, trainer: Any, step: int) -> None:
        from tests.fake_cuda import device

        self.by_step[step - 1] = device.take_counters()

    def on_step_launched(self, trainer: Any, step: Any) -> None:
        if "numbers" in vars(step.outcome):
            self.read_at_once.append(step.step)


@pytest.fixture(scope="module")
def waits(tmp_path_factory: pytest.TempPathFactory) -> Waits:
    directory = tmp_path_factory.mktemp("run")
    found = Waits()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        arguments = tiny(
            directory,
            f"--steps={STEPS}",
            "--log.every=1",
            f"--validation.every={VALIDATED}",
            f"--validation.samples={2 * MICROBATCHES}",
            f"--checkpoint.every={SAVED}",
        )
        assert main(arguments, [found]) == 0
    return found


def test_steps_wait_only_for_the_step_before(waits: Waits) -> None:
    read_early = {VALIDATED, VALIDATED + 1, SAVED, SAVED + 1}
    for step in set(range(3, STEPS)) - read_early:
        counts = waits.by_step[step]
        assert dict(counts.waits) == {"event.synchronize": 1}, step
        assert (counts.reads, counts.pageable_copies) == (0, 0), step


def test_no_step_is_read_when_it_has_just_been_launched(waits: Waits) -> None:
    assert not set(waits.read_at_once) - {VALIDATED}


def test_validation_reads_once(waits: Waits) -> None:
    assert waits.by_step[VALIDATED].waits.total() < MICROBATCHES


def test_save_waits_for_no_tensor(waits: Waits) -> None:
    assert waits.by_step[SAVED].waits.total() < 6
