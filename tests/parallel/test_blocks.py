from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distmp.errors import ConfigError
from distmp.parallel import ParallelConfig
from distmp.parallel.blocks import (
    checkpoint_activations,
    find_blocks,
    prepare_blocks,
)
from distmp.parallel.settings import ShardingConfig
from distmp.precision.keep import outermost
from tests.ranks import ranks
from tests.reference import INPUTS, TWO_RANKS, make_engine, make_model, train, weights


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))


class Decoder(nn.Module):
    """A model like those of Hugging Face: blocks in a nested list, named by class."""

    _no_split_modules = ("Layer",)

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(2, 2)])
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Layer() for _ in range(2))


def test_blocks_are_the_entries_of_the_outermost_lists() -> None:
    pair = nn.ModuleDict({"attention": nn.Linear(1, 1), "parts": nn.ModuleList([nn.ReLU()])})
    body = nn.ModuleList([pair, Layer(), nn.ReLU(), nn.ModuleList([nn.Linear(3, 3)])])
    model = nn.ModuleDict({"stem": nn.Linear(1, 1), "body": nn.Sequential(body)})
    found = find_blocks(model)
    # Lists and dictionaries are never called, so their entries are the blocks.
    assert list(found) == ["body.0.0.attention", "body.0.1", "body.0.3.0"]
    assert found["body.0.1"] is body[1]
    assert find_blocks(nn.Linear(1, 1)) == {}


def test_blocks_that_lists_share_have_one_name() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    model.ends = nn.ModuleList([model.layers[2], model.layers[0], nn.Linear(2, 2)])
    assert list(find_blocks(model)) == ["layers.0", "layers.1", "layers.2", "ends.2"]


def test_classes_that_the_model_does_not_split_come_first() -> None:
    assert list(find_blocks(Decoder())) == ["model.layers.0", "model.layers.1"]
    inside = nn.Sequential(Decoder())  # wrapped by the user
    assert list(find_blocks(inside)) == ["0.model.layers.0", "0.model.layers.1"]
    model = Decoder()
    model.embeddings, model.head = nn.Embedding(2, 2), nn.Linear(2, 2)
    model._no_split_modules = ("Layer", "Embedding")  # as in encoders
    blocks = ["model.layers.0", "model.layers.1", "embeddings"]
    assert list(find_blocks(model)) == blocks
    model.head.weight = model.embeddings.weight
    blocks.remove("embeddings")
    assert list(find_blocks(model)) == blocks
    model.stages = nn.ModuleDict({"first": Layer()})
    assert list(find_blocks(model)) == [*blocks, "stages.first"]
    del model.stages
    model._no_split_modules = ("ModuleList",)  # which is never called
    blocks = ["heads.0", "model.layers.0", "model.layers.1"]
    assert list(find_blocks(model)) == blocks
    for layer in model.model.layers:
        layer.attention = nn.Bilinear(2, 2, 2)
    model._no_split_modules = ("Bilinear",)  # a part of each layer
    assert list(find_blocks(model)) == blocks[1:]
    part = Layer()
    part.attention = nn.Bilinear(2, 2, 2)
    model.tower = nn.Sequential(part)
    assert list(find_blocks(model)) == [*blocks[1:], "tower.0"]
    del model.tower
    for layer in model.model.layers:
        del layer.attention
        layer.experts[0].part = nn.Bilinear(2, 2, 2)
    for names in (["Layer", "Bilinear"], ["Bilinear"]):  # experts of a layer are no blocks
        model._no_split_modules = names
        assert list(find_blocks(model)) == blocks[1:]
    model._no_split_modules = None
    assert list(find_blocks(model)) == ["heads.0", "model.layers.0", "model.layers.1"]


def test_patterns_are_for_names_and_classes() -> None:
    assert list(find_blocks(Decoder(), ["Line*"]))[:2] == ["heads.0", "model.layers.0.experts.0"]
    model = Decoder()
    both = find_blocks(model, ["model.layers.*", "heads.0"])
    assert "model.layers.1.experts.0" in both
    assert list(outermost(model, both)) == ["heads.0", "model.layers.0", "model.layers.1"]
    with pytest.raises(ConfigError, match="'Lyer': matches no module; did you mean 'Layer'"):
        find_blocks(Decoder(), ["Layer", "Lyer"])


def test_a_model_without_blocks_is_refused() -> None:
    for setting in ("compile", "activation_checkpointing"):
        with pytest.raises(ConfigError, match=f"{setting} = 'blocks': the model has neither"):
            prepare_blocks(nn.Linear(1, 1), ParallelConfig(**{setting: "blocks"}))


def test_checkpointing_computes_blocks_again_and_keeps_names_and_numbers() -> None:
    model, plain = make_model(), make_model()
    calls: list[Any] = []
    inner = model.blocks[0].linear
    inner.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    prepare_blocks(model, ParallelConfig(activation_checkpointing="blocks"))
    assert list(model.state_dict()) == list(plain.state_dict())
    x = torch.randn(3, INPUTS)
    for one in (model, plain):
        one(x).square().sum().backward()
    assert calls == [True, True]
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    with torch.no_grad():
        model(x)
    assert calls == [True, True, False]


class Scaled(nn.Linear):
    def forward(self, x: Tensor, debug: float = 0.0, context_fn: Any = None) -> Tensor:
        return (debug + 1) * super().forward(x) + context_fn


def test_recomputed_block_gets_keywords_that_checkpoint_also_has() -> None:
    block = Scaled(3, 3)
    x, shift = torch.randn(2, 3), torch.ones(3, requires_grad=True)
    expected = block(x, debug=4.0, context_fn=shift.square())
    checkpoint_activations(block)
    found = block(x, debug=4.0, context_fn=shift.square())
    assert torch.equal(found, expected)
    inputs = [block.weight, shift]
    for each in zip(
        *(torch.autograd.grad(y.sum(), inputs) for y in (found, expected)), strict=True
    ):
        assert torch.equal(*each)


@pytest.mark.parametrize("compile_with", [None, "eager"])
@pytest.mark.parametrize("block", [nn.Linear, nn.BatchNorm1d])
def test_copy_of_recomputed_block_uses_own_parameters_and_buffers(
    block: Any, compile_with: str | None
) -> None:
    original = block(*[3] * (1 + (block is nn.Linear)))
    checkpoint_activations(original, compile_with)
    copied, plain = copy.deepcopy(original), type(original).forward
    with torch.no_grad():
        for tensor in (*original.parameters(), *original.buffers()):
            tensor.zero_()
    x = torch.randn(4, 3, requires_grad=True)
    before = copy.deepcopy(copied)
    torch.testing.assert_close(copied(x), plain(before, x))
    copied(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in copied.parameters())
    assert all(tensor.eq(0).all() for tensor in original.buffers())


def test_recomputed_block_is_compiled_without_graph_breaks() -> None:
    block, x = nn.Linear(3, 3), torch.randn(4, 3, requires_grad=True)
    expected = block(x)
    checkpoint_activations(block)
    block.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(block(x), expected)


def test_compiled_blocks_keep_names_and_a_whole_model_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, plain, whole = make_model(), make_model(), make_model()
    seen: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(len(inputs))
        return graph.forward

    prepare_blocks(model, ParallelConfig(compile="blocks"), backend=backend)
    assert not caplog.records
    prepare_blocks(whole, ParallelConfig(compile="model"), backend=backend)
    assert "no reduction overlaps" in caplog.records[0].message
    assert caplog.records[0].levelno == logging.WARNING
    assert list(model.state_dict()) == list(plain.state_dict())
    x = torch.randn(3, INPUTS)
    torch.testing.assert_close(model(x), plain(x))
    assert 1 <= len(seen) <= 2  # the blocks, which may share compiled code
    torch.testing.assert_close(whole(x), plain(x))


@ranks(2)
def test_compiled_and_recomputed_blocks_train_sharded() -> None:
    compile_with = nn.Module.compile
    nn.Module.compile = lambda self, **_: compile_with(self, backend="aot_eager")
    ends = []
    for compilation, recomputed in (("none", "none"), ("blocks", "blocks")):
        parallel = ParallelConfig(
            ShardingConfig(accumulate="unsharded"),
            activation_checkpointing=recomputed,
            compile=compilation,
        )
        engine = make_engine(policy="bf16", strategy="fsdp", parallel=parallel)
        train(engine, 2, TWO_RANKS)
        ends.append(weights(engine))
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-3, atol=1e-4)
