"""Losses: each returns a sum and its weight, so that no mean of means is computed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from distmp.data import IGNORED
from distmp.errors import ConfigError, require
from distmp.models.linear_cross_entropy import check_targets
from distmp.utils.tensor_trees import described

_RIGHT = (
    "this model takes no attention_mask, so padding has to follow the tokens: each row is ones, "
    "then zeros; set padding_side='right' on the tokenizer"
)

_DOCUMENTS = (
    "restarts, which transformers ignores with an attention_mask; return labels in its place"
)


def is_hugging_face(batch: Mapping[str, Any]) -> bool:
    """Return whether a batch has the keys of Hugging Face.

    Raises:
        ConfigError: If it has "inputs", too.
    """
    problem = (
        "has 'inputs' and 'input_ids'; return either inputs and targets (shifted by one token), or "
        "input_ids and labels (not shifted)"
    )
    require("input_ids" not in batch or "inputs" not in batch, "batch", [*batch], problem)
    return "input_ids" in batch


def model_inputs(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the inputs and the targets of a batch with the keys of Hugging Face.

    Args:
        batch: "input_ids" int64 [batch, time]. "labels" of the same shape, not shifted; without
            them, every token that "attention_mask" (0 for padding) leaves is a label.

    Returns:
        Inputs and targets, int64 [batch, time]. The target of the last token is IGNORED.

    Raises:
        ConfigError: If there are neither labels nor a mask.
    """
    return batch["input_ids"], F.pad(_labels(batch)[:, 1:], (0, 1), value=IGNORED)


def model_options(batch: Mapping[str, Tensor], model: nn.Module) -> dict[str, Any]:
    """Return the keyword arguments with which a model is called for a batch.

    A model that takes `use_cache` gets False: with a cache, transformers does not look for packed
    documents in "position_ids".

    Args:
        batch: May have an "attention_mask" (0 for padding), which a model that does not take it
            needs only if the padding is not at the end, and "position_ids", which restart in each
            document.
        model: The model, perhaps wrapped.

    Raises:
        ConfigError: If there is padding where the model sees it, or "position_ids" that its
            forward does not take, or that restart although there is a mask.
    """
    options = {key: batch[key] for key in ("attention_mask", "position_ids") if key in batch}
    taken = arguments_of(model)
    ignored = options.keys() - taken
    problem = "has 'position_ids', which the model's forward does not take; leave them out"
    require("position_ids" not in ignored, "batch", [*batch], problem)
    if "attention_mask" in ignored:
        _check_padding(options.pop("attention_mask"))
    *_, inner = _in_wrappers(model)
    attention = getattr(getattr(inner, "config", None), "_attn_implementation", None)
    if len(options) == 2 and "use_cache" in taken and "flash" not in str(attention):
        _check_documents(**options)
    return {**options, "use_cache": False} if "use_cache" in taken else options


def _labels(batch: Mapping[str, Tensor]) -> Tensor:
    ids, labels, mask = batch["input_ids"], batch.get("labels"), batch.get("attention_mask")
    problem = (
        f"has no 'labels'; add them (a copy of input_ids, not shifted, with {IGNORED} where no "
        "token is to be predicted), or the 'attention_mask' of the padding, which gives them"
    )
    require(labels is not None or mask is not None, "batch", [*batch], problem)
    found = ids.masked_fill(mask == 0, IGNORED) if labels is None and mask is not None else labels
    if found is None or found.shape != ids.shape or ids.dim() != 2:
        shapes = {key: tuple(value.shape) for key, value in batch.items() if key != "position_ids"}
        raise ConfigError("batch", shapes, "input_ids and labels must be [batch, time]")
    return found


def _check_padding(mask: Tensor) -> None:
    """Refuse padding before tokens."""
    require(mask.dim() == 2, "attention_mask", tuple(mask.shape), _RIGHT)
    is_right = ((mask[:, 1:] != 0) <= (mask[:, :-1] != 0)).all(1)
    _check_rows(is_right, "attention_mask", mask, _RIGHT)


def _check_documents(attention_mask: Tensor, position_ids: Tensor) -> None:
    """Refuse positions that restart between two tokens, which transformers reads without a mask."""
    # A mask of pairs of tokens has the documents.
    if attention_mask.shape == position_ids.shape:
        has_padding = attention_mask[:, 1:] * attention_mask[:, :-1] == 0
        is_one = ((position_ids.diff() >= 0) | has_padding).all(1)
        _check_rows(is_one, "position_ids", position_ids, _DOCUMENTS)


def _check_rows(are_valid: Tensor, key: str, rows: Tensor, problem: str) -> None:
    """Refuse a batch with rows that are not valid.

    On a GPU, a comparison would make the host wait. There, a kernel stops the process.

    Raises:
        ConfigError: With the first row that is not valid.
    """
    if isinstance(rows, FakeTensor) or torch.compiler.is_compiling():
        return
    if rows.device.type != "cpu":
        torch._assert_async(are_valid.all(), f"{key}: {problem}")
    elif not are_valid.all():
        raise ConfigError(key, rows[~are_valid][0].tolist(), problem)


# Python modules of wrappers that change neither the arguments nor the output of a model: DDP,
# compiled modules, FSDP1, activation checkpointing, and those of libraries.
_WRAPPERS = (
    "torch.nn.parallel.",
    "torch._dynamo.",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed.algorithms.",
    "torch.optim.swa_utils",
    "accelerate.",
    "deepspeed.",
    "lightning.",
    "lightning_fabric.",
    "peft.",
    "pytorch_lightning.",
)


def next_token_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of the next token, summed over the targets that are not IGNORED.

    A model whose class has `takes_targets` computes the sum itself, in chunks of tokens:
    distmp's transformer, and Hugging Face models after `huggingface.prepare_loss`. With
    others, the logits of all tokens exist at once.

    Args:
        model: Called with "inputs"; returns logits [batch, time, vocabulary], or an output with an
            attribute `logits`, as models of Hugging Face do. If it takes targets, it returns the
            loss sum in place of logits.
        batch: "inputs" int64 [batch, time] and "targets" int64 [batch, time]. Or the keys of
            Hugging Face, "input_ids" and "labels" (see `model_inputs`). With either, it may have
            the keys that `model_options` reads.

    Returns:
        Loss sum in nats and number of targets, both FP32, 0-dim, on the device of the logits. The
        softmax is computed in FP32 for logits of any dtype. Counts are exact up to 2**24.

    Raises:
        ConfigError: For inputs that are no token ids, targets outside of the vocabulary, see
            `check_targets`, and a batch without these keys.

    Example:
        >>> import torch
        >>> from distmp.models.loss import next_token_loss
        >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5))
        >>> ids = torch.tensor([[0, 1, 2, 3]])
        >>> batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
        >>> loss_sum, tokens = next_token_loss(model, batch)
        >>> int(tokens)
        3
    """
    keys = batch if isinstance(batch, Mapping) else {}
    if is_hugging_face(keys):
        inputs, targets = model_inputs(batch)
    elif "inputs" in keys and "targets" in keys:
        inputs, targets = batch["inputs"], batch["targets"]
    else:
        raise ConfigError(
            "batch",
            described(batch),
            "the loss next_token reads the keys inputs and targets, both int64 [batch, time], or "
            "those of Hugging Face, input_ids and labels; return them from the dataset, or set "
            "model.loss to a function that reads what is there",
        )
    if targets.dtype != torch.int64:
        raise ConfigError("batch", described(batch), "targets are int64; return tensor.long()")
    if isinstance(inputs, Tensor) and inputs.is_floating_point():
        problem = "inputs are token ids, int64; set model.loss to a function for other inputs"
        raise ConfigError("batch", described(batch), problem)
    options = model_options(batch, model)
    if takes_targets(model):
        loss_sum = logits_of(model(inputs, targets=targets, **options))
    else:
        logits = logits_of(model(inputs, **options))
        check_targets(targets, logits.shape)
        loss_sum = F.cross_entropy(
            logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
    return loss_sum, (targets != IGNORED).sum().to(torch.float32)


def takes_targets(model: nn.Module) -> bool:
    """Return whether a model, perhaps wrapped, computes its loss itself."""
    return any(map(computes_loss, _in_wrappers(model)))


def computes_loss(module: nn.Module) -> bool:
    """Return whether the forward of a module, without its wrappers, computes the loss.

    Only `takes_targets` of the class that defines `forward` counts: another forward, which calls
    this one, may change what it returns.
    """
    if "takes_targets" in vars(module):
        return bool(module.takes_targets)
    for own in map(vars, type(module).__mro__):
        if own.keys() & {"forward", "takes_targets"}:
            return bool(own.get("takes_targets"))
    return False


def arguments_of(model: nn.Module) -> frozenset[str]:
    """Return the names of the arguments that the forward of a model takes, perhaps wrapped.

    Any keywords (`**kwargs`) do not count: many models ignore them. Nor do those of a scripted
    module, whose class has no forward.
    """
    *_, inner = _in_wrappers(model)
    return _arguments(getattr(type(inner), "forward", nn.Module.forward))


def _in_wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model, and the models in its wrappers, of which each has one child."""
    yield model
    while type(model).__module__.startswith(_WRAPPERS) and len(found := [*model.children()]) == 1:
        (model,) = found
        yield model


@functools.cache
def _arguments(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def logits_of(output: Any) -> Tensor:
    """Return the logits of a model's output: the output itself, or its `logits`.

    Raises:
        ConfigError: If it is neither a tensor, nor has it `logits`.
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        problem = "the model returned this; return logits, or an output with an attribute `logits`"
        raise ConfigError("model", type(output).__name__, problem)
    return logits
