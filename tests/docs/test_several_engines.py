"""The example of several engines trains, continues, and draws what it has learned."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from examples import gan
from tests.ranks import run_ranks


def run_example(directory: Path) -> tuple[float, float, list[str]]:
    """Train in two parts, the second from a checkpoint that one engine has not got."""
    torch.set_num_threads(1)
    before = gan.train(0, str(directory / "nothing"))
    gan.train(100, str(directory))
    generator, discriminator = gan.build("bf16-autocast")
    generator.load(directory / "generator")
    generator.step([torch.randn(4, gan.NOISE)])
    generator.save(directory / "generator")  # and the process ends before the other is saved
    del generator, discriminator
    after = gan.train(400, str(directory))
    saved = [path.name for path in sorted((directory / "generator").iterdir())]
    return before, after, saved


def end_between_the_first_saves(directory: Path) -> tuple[float, float]:
    radius = gan.train(3, str(directory))
    shutil.rmtree(directory / "discriminator" / "step-000003")
    return radius, gan.train(3, str(directory))


def test_gan_resumes_after_stop_between_first_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    ((before, after),) = run_ranks(end_between_the_first_saves, 1, tmp_path, timeout=60)
    assert before == after


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
def test_gan_learns_radius(
    world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    results = run_ranks(run_example, world_size, tmp_path, timeout=120)
    for before, after, saved in results:
        assert before < 0.6
        assert abs(after - 2.0) < 0.25
        assert saved == ["step-000101", "step-000400"]
        assert (before, after) == results[0][:2], "the metric is that of all ranks"
