"""Settings of the model: section `model` of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distmp.errors import nearest
from distmp.models.huggingface_files import PREFIX, locate
from distmp.utils.annotations import IGNORED, Section, dangerous
from distmp.utils.imports import load_function

if TYPE_CHECKING:
    from distmp.models.transformer import TransformerConfig


PERPLEXITY = "perplexity"
"""The metric that is derived from the loss."""

EMA_PREFIX = "ema_"
"""Beginning of the names of metrics that are computed with the average of the weights."""


_LLAMA_3 = {"key_value_heads": 8, "rotary_base": 500_000.0}
_UNTIED = {**_LLAMA_3, "tied_head": False}
SIZES: dict[str, dict[str, Any]] = {
    "1m": {"layers": 3, "dimension": 160, "heads": 5, "hidden": 480},
    "22m": {"layers": 12, "dimension": 384, "heads": 6, "hidden": 1056},
    "125m": {"layers": 12, "dimension": 768, "heads": 12, "hidden": 2048},
    "350m": {"layers": 24, "dimension": 1024, "heads": 16, "hidden": 2816},
    "1.3b": {"layers": 24, "dimension": 2048, "heads": 16, "hidden": 5504},
    "3b": {"layers": 28, "dimension": 3072, "heads": 24, "hidden": 8192, **_LLAMA_3},
    "8b": {"layers": 32, "dimension": 4096, "heads": 32, "hidden": 14336, **_UNTIED},
    "70b": {"layers": 80, "dimension": 8192, "heads": 64, "hidden": 28672, **_UNTIED},
}
"""Named sizes: options of the transformer, see `TransformerConfig`. The names of the first two
count parameters with a vocabulary of bytes; the next three are the usual sizes of that name, which
include the embeddings of about 50,000 tokens; the last three have the shapes of Llama 3."""


@dataclass(frozen=True)
class ModelConfig(Section, section="model"):
    """The model to train, and its loss."""

    name: str = "transformer"
    """'transformer' (decoder-only), 'hf:DIRECTORY' for a local model of Hugging Face transformers,
    or the import path 'module:callable' of a function that returns a torch.nn.Module."""

    size: str = "1m"
    """Named size of the transformer: 1m, 22m, 125m, 350m, 1.3b, or 3b, 8b or 70b, the shapes of
    Llama 3."""

    loss: str = field(
        default="next_token", metadata=dangerous("the model is trained for another objective")
    )
    """'next_token' (cross entropy) or the import path 'module:callable' of a function
    loss(model, batch) -> (loss sum, weight)."""

    weights: str | None = field(default=None, metadata=IGNORED)
    """Directory of safetensors (or one such file) that a new run starts from, for example from
    `distmp export`; null: random weights. A resumed run loads its checkpoint instead."""

    unmatched_weights: tuple[str, ...] = field(default=(), metadata=IGNORED)
    """Patterns (`*` and `?`) for the names of weights that only the directory of a Hugging Face
    model has, which are left out, for example `model.layers.1.*` with fewer layers, or only the
    model, which get random values; others are an error."""

    peft: dict[str, Any] | None = field(
        default=None, metadata=dangerous("other parameters are trained")
    )
    """Freeze the model and train adapters (LoRA) instead: settings of peft's LoraConfig, such as
    {r: 16, lora_alpha: 32, target_modules: [q_proj, v_proj]}; null: train all parameters."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the callable of an import path; for a Hugging Face model, values that
    replace those in config.json. The transformer takes `layers`, `dimension`, `heads`,
    `key_value_heads` and `hidden` in place of those of the named size, `vocabulary_size` and
    `sequence_length` in place of those of the data, `tied_head` (true, false), `rotary_base` (a
    number), `qk_norm` (true, false) and `norm_epsilon`."""

    def _check(self) -> None:
        if self.is_hugging_face:
            locate(self.name)
        hint = "write 'transformer', 'hf:DIRECTORY' or an import path 'module:callable'"
        self._require(":" in self.name or self.name == "transformer", "name", hint)
        hint = "write 'next_token' or an import path 'module:callable'"
        self._require(":" in self.loss or self.loss == "next_token", "loss", hint)
        self._require(self.size in SIZES, "size", nearest(self.size, SIZES))
        problem = f"is a size of the transformer, not of {self.name!r}; set model.options"
        self._require(self.name == "transformer" or self.size == "1m", "size", problem)
        if self.name == "transformer" and self.options:
            self.transformer(vocabulary_size=1, sequence_length=1)
        if self.peft is not None:
            from distmp.models import adapters  # imports torch

            adapters.check_settings(self.peft)

    @property
    def is_hugging_face(self) -> bool:
        """Whether the model is one of Hugging Face transformers."""
        return self.name.startswith(PREFIX)

    @property
    def is_import_path(self) -> bool:
        """Whether the model is built by a callable of the user."""
        return ":" in self.name and not self.is_hugging_face

    def function(self) -> Callable[..., Any]:
        """Import and return the function of an import path.

        Raises:
            ConfigError: If it does not exist, is not callable, or does not take the options.
        """
        problem = (
            f"cannot be called with model.options = {self.options} ({{reason}}); change "
            "model.options or the function"
        )
        return load_function("model.name", self.name, self.options, problem)

    def transformer(self, vocabulary_size: int, sequence_length: int) -> TransformerConfig:
        """Return the configuration of the transformer.

        Args:
            vocabulary_size: Number of token ids, unless `options` has it.
            sequence_length: Longest sequence, unless `options` has it.

        Raises:
            ConfigError: If an option is invalid.
        """
        # Import lazily: a custom training loop needs neither YAML nor the command line, and the
        # help of a command does not need torch.
        from distmp.models.transformer import TransformerConfig
        from distmp.utils.settings import from_mapping

        size = {**SIZES[self.size]}
        if "heads" in self.options:
            size.pop("key_value_heads", None)
        lengths = {"vocabulary_size": vocabulary_size, "sequence_length": sequence_length}
        return from_mapping(TransformerConfig, {**lengths, **size, **self.options}, "model.options")
