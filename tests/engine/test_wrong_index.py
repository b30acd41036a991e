"""An index out of range names the step, and the ranges of its labels and token ids."""

from __future__ import annotations

import os
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distmp.engine.engine import Engine
from distmp.errors import ConfigError, TrainingError
from distmp.models.loss import next_token_loss

ROWS = 8


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = model(batch["ids"])
    return F.cross_entropy(logits, batch["labels"], reduction="sum"), len(logits)


def engine(device: str, loss: Any = loss) -> Engine:
    model = nn.Sequential(nn.Embedding(ROWS, 4), nn.Linear(4, ROWS))
    build = torch.optim.SGD
    return Engine(model, loss, lambda named: build(named, lr=0.1), device=device, policy="fp32")


def batch(largest: int) -> dict[str, Tensor]:
    return {"ids": torch.tensor([1, 2]), "labels": torch.tensor([0, largest])}


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_label_out_of_range_names_step_ranges_and_line(kind: Callable[[Any], Any]) -> None:
    trained = engine("cpu")
    trained.step([batch(1)])
    with pytest.raises(TrainingError) as caught:
        trained.step([batch(1), kind(batch(ROWS))])
    first, *rest = str(caught.value).split("\n  - ")
    assert first == "an index is out of range on rank 0 in step 2: Target 8 is out of bounds."
    assert f"embeddings of the model have {ROWS} rows" in rest[0]
    assert rest[1].startswith("step 2: microbatch 2['labels'] from 0 to 8, microbatch ")
    assert rest[2].startswith(f"it was raised in {__file__}:")


def test_line_is_named_in_environment_called_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile(
        "def elsewhere(model, batch): return loss(model, batch)", "/home/me/torch/train.py", "exec"
    )
    names: dict[str, Any] = {"loss": loss}
    exec(code, names)
    monkeypatch.setattr(loss, "__code__", loss.__code__.replace(co_filename="/a/torch/loss.py"))
    with pytest.raises(TrainingError, match=r"it was raised in /a/torch/loss\.py:\d+$"):
        engine("cpu", names["elsewhere"]).step([batch(ROWS)])


def test_index_error_without_embeddings_names_no_rows() -> None:
    def classified(model: nn.Module, labels: Tensor) -> tuple[Tensor, int]:
        return F.cross_entropy(model(torch.ones(2, 4)), labels, reduction="sum"), 2

    built = Engine(nn.Linear(4, 3), classified, torch.optim.SGD, policy="fp32", device="cpu")
    with pytest.raises(TrainingError, match="with the vocabulary or the classes; labels that"):
        built.step([torch.tensor([0, 3])])


def test_refused_batch_names_its_step() -> None:
    trained = engine("cpu", next_token_loss)
    ids = torch.tensor([[1, 2]])
    trained.step([{"inputs": ids, "targets": ids}])
    for _ in range(2):  # a refused step is not counted
        with pytest.raises(ConfigError, match=r"batch = 'targets from 1 to 9': .*; in step 2$"):
            trained.step([{"inputs": ids, "targets": torch.tensor([[1, 9]])}])


def test_other_errors_are_not_changed() -> None:
    def broken(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return [][0], 1

    with pytest.raises(IndexError, match="list index out of range"):
        engine("cpu", broken).step([batch(1)])


@pytest.mark.gpu
@pytest.mark.not_replayed
@pytest.mark.skipif("FAKE_CUDA_DEVICES" not in os.environ, reason="a GPU would be unusable then")
@pytest.mark.parametrize("blocking", [False, True])
def test_device_side_assert_names_the_steps_that_may_have_failed(
    blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", str(int(blocking)))
    trained = engine("cuda")
    trained.step([batch(1)])

    def more_steps() -> None:
        for largest in (ROWS, 1, 1):
            trained.step([batch(largest)])

    with pytest.raises(TrainingError) as caught:
        more_steps()
    first, *rest = str(caught.value).split("\n  - ")
    assert "step 2" in first
    assert "CUDA error: device-side assert triggered" in first
    assert "step 2: microbatch 1['labels'] from 0 to 8, microbatch 1['ids'] from 1 to 2" in rest
    assert rest[-1].startswith("it was raised in" if blocking else "set CUDA_LAUNCH_BLOCKING=1")
