"""Maps distmp's transformer to the names and the configuration of transformers' Llama.

With norms of queries and keys, it is transformers' Qwen3, which is otherwise the same. Where distmp
has one matrix for queries, keys and values, and one for gate and up, transformers has one for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from distmp.errors import ConfigError
from distmp.models.transformer import TransformerConfig

# Values of `model_type`, without and with `qk_norm`.
LLAMA, QWEN3 = "llama", "qwen3"
MODEL_TYPES = (LLAMA, QWEN3)


class Rows(NamedTuple):
    """A tensor of transformers: rows of a tensor of distmp.

    Attributes:
        name: Name of distmp's tensor.
        start: First row.
        stop: One after the last row.
    """

    name: str
    start: int
    stop: int


def rows_by_name(config: TransformerConfig) -> dict[str, Rows]:
    """Return where the values of each tensor of transformers are, by its name."""
    width = config.dimension // config.heads
    queries, keys = config.heads * width, config.groups * width
    table = {
        "model.embed_tokens.weight": Rows("embedding.weight", 0, config.vocabulary_size),
        "model.norm.weight": Rows("norm.weight", 0, config.dimension),
    }
    if not config.tied_head:
        table["lm_head.weight"] = Rows("head.weight", 0, config.vocabulary_size)
    block = {
        "self_attn.q_proj": ("attention.query_key_value", 0, queries),
        "self_attn.k_proj": ("attention.query_key_value", queries, queries + keys),
        "self_attn.v_proj": ("attention.query_key_value", queries + keys, queries + 2 * keys),
        "self_attn.o_proj": ("attention.output", 0, config.dimension),
        "mlp.gate_proj": ("feed_forward.gate_up", 0, config.hidden),
        "mlp.up_proj": ("feed_forward.gate_up", config.hidden, 2 * config.hidden),
        "mlp.down_proj": ("feed_forward.down", 0, config.dimension),
        "input_layernorm": ("attention_norm", 0, config.dimension),
        "post_attention_layernorm": ("feed_forward_norm", 0, config.dimension),
    }
    if config.qk_norm:
        block["self_attn.q_norm"] = ("attention.query_norm", 0, width)
        block["self_attn.k_norm"] = ("attention.key_norm", 0, width)
    for layer in range(config.layers):
        for theirs, (ours, start, stop) in block.items():
            table[f"model.layers.{layer}.{theirs}.weight"] = Rows(
                f"blocks.{layer}.{ours}.weight", start, stop
            )
    return table


def describe(config: TransformerConfig, dtype: str) -> dict[str, Any]:
    """Return the content of transformers' config.json.

    Args:
        config: The transformer.
        dtype: Name of the dtype of the weights, such as "float32".
    """
    return {
        "model_type": QWEN3 if config.qk_norm else LLAMA,
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"],
        "vocab_size": config.vocabulary_size,
        "max_position_embeddings": config.sequence_length,
        "num_hidden_layers": config.layers,
        "hidden_size": config.dimension,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.groups,
        "head_dim": config.dimension // config.heads,
        "intermediate_size": config.hidden,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied_head,
        "rope_theta": config.rotary_base,
        "rope_scaling": None,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def check_same(described: Mapping[str, Any], config: TransformerConfig, directory: str) -> None:
    """Check that a config.json of transformers describes the same model, except for its length.

    Raises:
        ConfigError: If it does not; it lists the values that differ.
    """
    expected = describe(config, "float32")
    theta, scaling = _rotary(described)
    found = {**described, "rope_theta": theta, "rope_scaling": scaling}
    found.setdefault("num_key_value_heads", found.get("num_attention_heads"))
    ignored = ("architectures", "max_position_embeddings", "dtype", "torch_dtype")
    defaults = {"head_dim": expected["head_dim"], "attention_bias": False, "mlp_bias": False}
    differing = [
        f"{key} = {found.get(key, defaults.get(key))} for {value}"
        for key, value in expected.items()
        if key not in ignored and (found.get(key, defaults.get(key)) or None) != (value or None)
    ]
    if differing:
        raise ConfigError(
            "model.weights", directory, f"does not fit the model: {', '.join(differing)}"
        )


def _rotary(described: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Return base and scaling; transformers 5 writes both as `rope_parameters`."""
    parameters = dict(described.get("rope_parameters") or described.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", described.get("rope_theta", 10_000.0))
    kind = parameters.get("rope_type", parameters.pop("type", "default"))
    return float(theta), None if kind == "default" else parameters
