"""A Llama with random weights in several files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distmp.export.files import write


class RandomWeights:
    """Random weights of a model of transformers, one tensor at a time; see `export.files`.

    Args:
        values: Values of a `LlamaConfig`.
        dtype: Dtype of the weights.

    Attributes:
        config: The configuration.
        specs: Shape and dtype of each tensor, as tensors on the meta device.
    """

    is_collective = False

    def __init__(self, values: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self.config = LlamaConfig(**values)
        with torch.device("meta"):
            model = LlamaForCausalLM(self.config)
        self.specs = {name: value.to(dtype) for name, value in model.state_dict().items()}

    def read(self, name: str) -> Tensor:
        """Return random values; ones for the weights of norms."""
        spec = self.specs[name]
        if spec.dim() == 1:
            return torch.ones_like(spec, device="cpu")
        return torch.empty_like(spec, device="cpu").normal_(std=0.02)


def write_llama(directory: Path, values: Mapping[str, Any], shard_bytes: int) -> int:
    """Write a Llama with random weights in bf16; return the number of its parameters."""
    weights = RandomWeights(values)
    described = weights.config.to_dict()
    write(directory, weights, described, torch.bfloat16, shard_bytes)
    return sum(spec.numel() for spec in weights.specs.values())
