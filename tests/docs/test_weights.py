"""The examples of the page on weights work on two ranks, and do what the page says."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import distmp
from benchmarks.figures import ROOT
from distmp.errors import CheckpointError
from distmp.export.running import trained_weights
from distmp.models.transformer import Transformer, TransformerConfig
from distmp.utils.flat_shard import gathered
from tests.ranks import in_turn, ranks, run_ranks

PAGE = (ROOT / "docs" / "weights.md").read_text()
KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "shard_optimizer": {"strategy": "ddp", "shard_optimizer": True},
    "fsdp": {"strategy": "fsdp"},
}


def example(heading: str) -> str:
    """Return the code block below a heading."""
    section = PAGE.partition(f"## {heading}\n")[2]
    return re.findall(r"```py(?:thon)?\n(.*?)```", section, flags=re.DOTALL)[0]


def run_example(heading: str, directory: Path, **settings: Any) -> dict[str, Any]:
    """Run a block in a directory, with other settings of the engine; return its variables."""
    found: dict[str, Any] = {"__name__": "example"}
    build = distmp.Engine

    def engine(*arguments: Any, **keywords: Any) -> distmp.Engine:
        return build(*arguments, **(keywords | settings))

    directory.mkdir(exist_ok=True)
    os.chdir(directory)
    torch.manual_seed(1)
    with mock.patch.object(distmp, "Engine", engine):
        exec(compile(example(heading), heading, "exec"), found)
    return found


def full(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix("model/"): gathered(tensor).detach().clone()
        for name, tensor in state.items()
        if name.startswith("model/")
    }


def whole(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: gathered(value).detach().clone() for name, value in values.items()}


@ranks(2)
@in_turn("kind", [*KINDS])
def test_exported_weights_are_fp32(kind: str, tmp_path: Path) -> None:
    found = run_example("The FP32 weights", tmp_path / kind, **KINDS[kind])
    engine, weights = found["engine"], found["weights"]
    expected = full(engine.state_dict())
    written = load_file(tmp_path / kind / "runs/weights/last/model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], value) for name, value in expected.items())
    assert weights.keys() == (expected.keys() if engine.world.rank == 0 else set())
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())
    assert any(bool((value != value.bfloat16()).any()) for value in expected.values())
    engine.step([torch.randn(16, 8)])
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())
    held = engine.module.state_dict()["0.weight"]
    assert held.dtype == (torch.float32 if kind == "fsdp" else torch.bfloat16)


@ranks(2)
@in_turn("kind", [*KINDS])
def test_average_agrees_with_full_weights(kind: str, tmp_path: Path) -> None:
    found = run_example("EMA of the weights", tmp_path / kind, **KINDS[kind])
    engine, average = found["engine"], found["average"]
    expected = whole(average.values)
    for seed in range(3):
        torch.manual_seed(seed)
        engine.step([torch.randn(16, 8)])
        average.update()
        for name, value in full(engine.state_dict()).items():
            expected[name].lerp_(value, 0.1)
    result, weights = whole(average.values), full(engine.state_dict())
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=1e-6, atol=1e-7)
        assert not torch.equal(value, weights[name])
    with average.as_weights():
        module = engine.model.state_dict(keep_vars=True)
        assert all(
            torch.equal(gathered(module[n].detach()).float(), value.to(module[n].dtype).float())
            for n, value in result.items()
        )
    assert all(torch.equal(value, weights[n]) for n, value in full(engine.state_dict()).items())
    written = load_file(tmp_path / kind / "runs/weights/average/model.safetensors")
    assert written.keys() == weights.keys()
    assert written["weight"].dtype == torch.float32
    resume = compile(example("Save and resume the average"), "resume", "exec")
    exec(resume, found)  # the steps 9 and 10
    result, weights = whole(average.values), full(engine.state_dict())
    engine.step([torch.randn(16, 8)])
    average.update()
    exec(resume, found)  # back to the checkpoint, without further steps
    assert found["saved"] == {"step": 10, "average": "runs/averaged/average/step-000010"}
    assert all(torch.equal(value, weights[n]) for n, value in full(engine.state_dict()).items())
    assert all(torch.equal(value, result[name]) for name, value in whole(average.values).items())
    average.update()


@ranks(1)
def test_average_of_last_healthy_checkpoint_is_kept(tmp_path: Path) -> None:
    found = run_example("EMA of the weights", tmp_path)
    heading = "Save and resume the average"
    resume = compile(example(heading).replace(", 10)", ", 18)"), heading, "exec")

    def inputs(*shape: int) -> Tensor:
        good = not 3 <= len(steps) < 13
        steps.append(good)
        return torch.randn(shape) if good else torch.full(shape, torch.nan)

    steps: list[bool] = []
    found["torch"] = SimpleNamespace(randn=inputs)
    with pytest.warns(RuntimeWarning, match="10 steps in a row were skipped"):
        exec(resume, found)  # steps 6 to 8, and 10 that are skipped
    exec(resume, found)
    assert found["saved"] == {"step": 6, "average": "runs/averaged/average/step-000006"}


@pytest.mark.nightly
def test_adapters_load_in_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(config)
    base.save_pretrained(tmp_path / "base")
    tokens = torch.randint(64, (2, 16))
    with torch.no_grad():
        untrained = base(tokens).logits
    logits, trained = run_ranks(_train_adapter, 2, tmp_path, tokens)[0]
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    state = peft.get_peft_model_state_dict(loaded)
    assert len(state) == len(trained) == 2 * 2 * 2
    for name, value in state.items():
        assert torch.equal(value, trained[name.replace(".weight", ".default.weight")]), name
    with torch.no_grad():
        found = loaded(tokens).logits
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)
    assert (found - untrained).abs().max() > 0.05


def _train_adapter(directory: Path, tokens: Tensor) -> Any:
    found = run_example("Adapters", directory, policy="fp32")
    engine = found["engine"]
    if engine.world.rank == 0:
        with pytest.raises(RuntimeError, match="storage"):  # as the page says
            engine.model.save_pretrained("shards")
    with torch.no_grad():
        logits = engine.module(tokens).logits
    return logits, found["weights"]


@ranks(2)
@in_turn("kind", ["ddp", "fsdp"])
def test_unwritable_directory_is_error_on_all_ranks(kind: str, tmp_path: Path) -> None:
    engine = distmp.Engine(nn.Linear(4, 4), _loss, _sgd, policy="fp32", **KINDS[kind])
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write"):
        engine.export(tmp_path / "file" / "weights")


@ranks(2)
def test_transformer_is_written_as_shards_with_configuration(tmp_path: Path) -> None:
    model = Transformer(TransformerConfig(32, 8, 2, 16, 2, 24))
    engine = distmp.Engine(model, _loss, _sgd, policy="fp32", strategy="fsdp")
    engine.export(tmp_path / "weights", max_shard_size=4000)
    torch.distributed.barrier()
    from distmp.export.weights import load_model

    assert len([*(tmp_path / "weights").glob("*.safetensors")]) > 1
    loaded = load_model(tmp_path / "weights").state_dict()
    expected = full(engine.state_dict())
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())


def test_state_dict_of_rounded_weights_warns() -> None:
    engine = distmp.Engine(nn.Linear(4, 4), _loss, _sgd, policy="bf16", strategy="single")
    with pytest.warns(RuntimeWarning, match=r"bfloat16 copies .* engine\.state_dict"):
        engine.module.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = distmp.Engine(nn.Linear(4, 4), _loss, _sgd, policy="bf16", strategy="single")
        trained_weights(other)
        other.load_state_dict(other.state_dict())
        exact = distmp.Engine(nn.Linear(4, 4), _loss, _sgd, policy="fp32", strategy="single")
        exact.module.state_dict()


def _loss(module: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return module(batch).square().sum(), len(batch)


def _sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([tensor for _, tensor in named], lr=0.1)
