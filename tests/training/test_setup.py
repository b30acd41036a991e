"""Models whose constructor cannot be deferred."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from distmp.config import load
from distmp.distributed.world import World
from distmp.training.setup import prepare
from tests.torchrun import corpus
from tests.utils.test_deferred import ReadsMemory

MODEL = f"{ReadsMemory.__module__}:{ReadsMemory.__qualname__}"


def build(directory: Path, *options: str) -> None:
    """Build the model on the first of two ranks."""
    settings = [f"--model.name={MODEL}", f"--data.path={corpus(directory)}", *options]
    prepare(load([*settings, "--data.sequence-length=16"]), World(0, 2, torch.device("cpu"), None))


@pytest.mark.parametrize(
    ("option", "messages"),
    [("--strategy=auto", 1), ("--strategy=fsdp", 1), ("--strategy=ddp", 0)],
)
def test_a_model_that_cannot_be_deferred_is_built_whole(
    tmp_path: Path, option: str, messages: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="distmp"):
        build(tmp_path, option)
    warnings = [
        message for message in caplog.messages if message.endswith("builds the whole model first")
    ]
    assert len(warnings) == messages
