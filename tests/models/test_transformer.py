"""The transformer, compared with a float64 implementation with loops and complex numbers."""

from __future__ import annotations

import cmath
import math
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distmp.errors import ConfigError
from distmp.models.architecture import TRANSFORMER, described
from distmp.models.settings import ModelConfig
from distmp.models.transformer import (
    RMSNorm,
    Transformer,
    TransformerBlock,
    TransformerConfig,
    rotary_tables,
    rotate,
)
from tests.recording import Operators

CONFIG = TransformerConfig(
    vocabulary_size=31, sequence_length=24, layers=2, dimension=16, heads=2, hidden=20
)


def model(config: TransformerConfig = CONFIG, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(config)


def tokens(batch: int = 2, time: int = 9) -> Tensor:
    return torch.randint(31, (batch, time), generator=torch.Generator().manual_seed(1))


# --- reference ---


def reference_norm(x: Tensor, norm: RMSNorm) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def reference_rotation(x: Tensor, position: int, base: float) -> Tensor:
    """Rotate the pairs of one head's vector, as complex numbers."""
    half = len(x) // 2
    turned = [
        complex(x[i], x[i + half]) * cmath.exp(1j * position * base ** (-2 * i / len(x)))
        for i in range(half)
    ]
    return torch.tensor([z.real for z in turned] + [z.imag for z in turned], dtype=torch.float64)


def reference_attention(block: TransformerBlock, x: Tensor, config: TransformerConfig) -> Tensor:
    attention, width = block.attention, config.dimension // config.heads
    queries, keys = config.heads * width, config.groups * width
    products = x @ attention.query_key_value.weight.T
    query, key, value = products.split([queries, keys, keys], -1)
    mixed = torch.zeros_like(x)
    for head in range(config.heads):
        part = slice(head * width, (head + 1) * width)
        group = head * config.groups // config.heads
        of_group = slice(group * width, (group + 1) * width)
        q_rows, k_rows = query[:, part], key[:, of_group]
        if attention.query_norm is not None and attention.key_norm is not None:
            q_rows = reference_norm(q_rows, attention.query_norm)
            k_rows = reference_norm(k_rows, attention.key_norm)
        q = [reference_rotation(v, t, config.rotary_base) for t, v in enumerate(q_rows)]
        k = [reference_rotation(v, t, config.rotary_base) for t, v in enumerate(k_rows)]
        for t in range(len(x)):
            scores = torch.stack([q[t] @ k[s] for s in range(t + 1)]) / math.sqrt(width)
            mixed[t, part] = torch.softmax(scores, 0) @ value[: t + 1, of_group]
    return mixed @ block.attention.output.weight.T


def reference_logits(model: Transformer, ids: Tensor) -> Tensor:
    x = model.embedding.weight[ids]
    for block in model.blocks:
        assert isinstance(block, TransformerBlock)
        normed = reference_norm(x, block.attention_norm)
        x = x + reference_attention(block, normed, model.config)
        normed = reference_norm(x, block.feed_forward_norm)
        gate, up = (normed @ block.feed_forward.gate_up.weight.T).chunk(2, -1)
        x = x + (gate * torch.sigmoid(gate) * up) @ block.feed_forward.down.weight.T
    head = model.embedding if model.head is None else model.head
    return reference_norm(x, model.norm) @ head.weight.T


def spread(model: Transformer) -> Transformer:
    """Give all parameters large values, so that every part affects the result."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.3 * noise + (parameter.dim() == 1)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"tied_head": False},
        {"tied_head": True, "rotary_base": 500.0},
        {"key_value_heads": 2, "norm_epsilon": 1e-2},
        {"key_value_heads": 1, "qk_norm": True},
    ],
)
@torch.no_grad()
def test_logits_agree_with_reference(options: dict[str, Any]) -> None:
    config = TransformerConfig(31, 24, 2, 16, 4, 20, **options)
    ours = spread(model(config))
    ids = tokens(batch=3)
    logits = ours(ids)
    assert logits.shape == (3, 9, 31)
    exact = spread(model(config)).double()
    for row in range(3):
        expected = reference_logits(exact, ids[row])
        torch.testing.assert_close(logits[row].double(), expected, rtol=1e-4, atol=1e-4)


# --- rotary positions ---


def test_rotation_agrees_with_complex_numbers_at_large_positions() -> None:
    cosine, sine = rotary_tables(torch.arange(3000), 8, 10_000.0)
    x = torch.randn(1, 3000, 4, 8, generator=torch.Generator().manual_seed(0))
    query, key, value = rotate(x, 1, cosine, sine)
    assert torch.equal(value, x[:, :, 3:])
    for position in (0, 1, 255, 257, 2999):
        for head, turned in ((1, query[0, position, 1]), (2, key[0, position, 0])):
            expected = reference_rotation(x[0, position, head].double(), position, 10_000.0)
            torch.testing.assert_close(turned.double(), expected, rtol=0, atol=2e-3)


def test_rotation_has_the_gradient_of_its_values() -> None:
    cosine, sine = rotary_tables(torch.arange(3), 6, 100.0)
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64, requires_grad=True)
    # FP32 tables are the same numbers in both.
    assert torch.autograd.gradcheck(lambda x: rotate(x, 1, cosine, sine), x)


def test_blocks_share_the_cast_of_the_tables() -> None:
    tables = rotary_tables(torch.arange(3), 6, 100.0)
    x = torch.randn(2, 3, 5, 6)
    casts = []
    for _ in range(2):
        with Operators() as operators:
            rotate(x.bfloat16(), 1, *tables)
        casts.append(operators.counts["aten::_to_copy"])
    assert casts == [1 + 2, 1]
    # In FP32, the tables are not those that were rounded before.
    expected = rotate(x, 1, *rotary_tables(torch.arange(3), 6, 100.0))
    assert all(map(torch.equal, rotate(x, 1, *tables), expected))


def test_compiled_rotation_agrees() -> None:
    cosine, sine = rotary_tables(torch.arange(3), 6, 100.0)
    x = torch.randn(2, 3, 5, 6, requires_grad=True)
    found = torch.compile(rotate, backend="aot_eager", fullgraph=True)(x, 2, cosine, sine)
    expected = rotate(x, 2, cosine, sine)
    torch.testing.assert_close(found, expected)
    weights = [torch.randn_like(part) for part in found]
    torch.testing.assert_close(
        torch.autograd.grad(found, x, weights), torch.autograd.grad(expected, x, weights)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_do_not_round_angles(dtype: torch.dtype) -> None:
    # In bfloat16 the positions 257 and 258 are both 256 or 258: tables would repeat.
    seen: list[Tensor] = []
    config = TransformerConfig(31, 600, 1, 16, 2, 20)
    ours = model(config).to(dtype)
    ours.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.extend(inputs[1:3]))
    ours(tokens(1, 600))
    angles = torch.arange(600, dtype=torch.float64)[:, None] * 10_000.0 ** (
        -torch.arange(0, 8, 2, dtype=torch.float64) / 8
    )
    cosine, sine = (table[:, 0].double() for table in seen)
    torch.testing.assert_close(cosine, angles.cos(), rtol=0, atol=1e-4)
    torch.testing.assert_close(sine, angles.sin(), rtol=0, atol=1e-4)


# --- norm ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_norm_is_computed_in_fp32(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(512, 1e-5)
    norm.weight.data = torch.rand(512, generator=generator).to(weight_dtype)
    # In float16 the squares of these would overflow.
    x = (300 * torch.randn(64, 512, generator=generator)).to(dtype)
    expected = reference_norm(x.double(), deepcopy(norm).double()).to(dtype)
    result = norm(x)
    assert result.dtype == dtype
    # At most the last bit may differ, by rounding in another place.
    torch.testing.assert_close(result, expected, rtol=torch.finfo(dtype).eps * 2, atol=1e-6)


# --- behavior ---


def test_attention_is_causal() -> None:
    ours = spread(model())
    ids = tokens()
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 31
    before, after = ours(ids), ours(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert (before[:, 5:] - after[:, 5:]).abs().amax(-1).min() > 1e-4


def test_every_parameter_gets_gradient() -> None:
    ours = spread(model())
    ours(tokens()).logsumexp(-1).sum().backward()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_sequence_that_is_too_long_is_refused() -> None:
    model()(tokens(1, 24))
    with pytest.raises(ValueError, match=r"25 tokens, and model\.options\.sequence_length is 24"):
        model()(tokens(1, 25))


def test_initial_weights_have_expected_deviation() -> None:
    ours = model(TransformerConfig(257, 16, 4, 128, 4, 384, tied_head=False))
    deviations = {name: p.std().item() for name, p in ours.named_parameters() if p.dim() == 2}
    for name, deviation in deviations.items():
        residual = name.endswith(("attention.output.weight", "down.weight"))
        expected = 0.02 / math.sqrt(8) if residual else 0.02
        assert deviation == pytest.approx(expected, rel=0.02), name
    assert len(deviations) == 18


@pytest.mark.parametrize("tied", [False, True])
def test_model_on_meta_device_gets_equal_values(tied: bool) -> None:
    config = TransformerConfig(31, 24, 2, 16, 2, 20, tied_head=tied)
    with torch.device("meta"):
        ours = Transformer(config)
    ours.to_empty(device="cpu")
    for parameter in ours.parameters():
        parameter.data.fill_(float("nan"))
    torch.manual_seed(5)
    for module in ours.modules():
        owned = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if owned:
            assert isinstance(module, nn.Module)
            module.reset_parameters()  # type: ignore[operator]
    expected = model(config, seed=5)
    for (name, value), other in zip(
        ours.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        assert torch.equal(value, other), name
    assert torch.equal(ours(tokens()), expected(tokens()))


def test_state_holds_only_parameters() -> None:
    # A buffer would be cast with the model, and missing after `to_empty`.
    assert list(model().buffers()) == []
    assert set(model().state_dict()) == {name for name, _ in model().named_parameters()}


def test_autocast_changes_logits_only_by_rounding() -> None:
    ours = spread(model())
    expected = ours(tokens())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = ours(tokens())
    assert (logits - expected).norm() < 0.03 * expected.norm()


def test_model_is_rebuilt_from_description() -> None:
    for config in (CONFIG, replace(CONFIG, tied_head=False, key_value_heads=1, qk_norm=True)):
        values = described(Transformer(config)) or {}
        assert values.pop("model_type") == TRANSFORMER
        assert TransformerConfig(**values) == config


def test_mismatched_head_counts_are_refused() -> None:
    message = r"^model\.options\.key_value_heads = 3: does not divide model\.options\.heads = 5"
    with pytest.raises(ConfigError, match=message):
        ModelConfig(options={"key_value_heads": 3})
    other = ModelConfig(size="8b", options={"heads": 64}).transformer(10, 10)
    assert other.key_value_heads is None
    assert ModelConfig(size="8b").transformer(10, 10).key_value_heads == 8
