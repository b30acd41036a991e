"""Checks of what a step is called with and of what the loss function returns.

Each mistake gets one message that names what came and what is expected. What costs more than a few
comparisons on the host is checked in the first step alone (`FirstStep`).
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from distmp.distributed.world import World
from distmp.engine.outcome import StepOutcome
from distmp.errors import ConfigError, listed
from distmp.precision.policy import dtype_word
from distmp.utils.dtypes import dtype_name

# Elements of a batch that are compared between ranks.
COMPARED = 2**16
# A loss sum over twice as many equal samples doubles; a mean stays as it is.
LEAST_GROWTH = 1.2

ONE_LIST = "pass a list of microbatches: engine.step([batch]) or engine.step([batch, batch])"
LOSS_CONTRACT = (
    "return (loss_sum, weight): the loss summed over samples or tokens, and their number"
)
SEVERAL = "pass an iterable of microbatches: engine.evaluate([batch, batch])"
LOSS_CALL = (
    "pass a function loss(module, batch) that runs module(...) and returns (loss_sum, weight)"
)


def check_microbatches(microbatches: Any) -> None:
    """Refuse one batch, or something without a length, where a list of microbatches is expected.

    Raises:
        ConfigError: Naming what came in its place.
    """
    _refuse_one_batch(microbatches, ONE_LIST)
    if not isinstance(microbatches, Sequence) or isinstance(microbatches, str | bytes):
        raise ConfigError(
            "microbatches",
            _kind(microbatches),
            "has no length and no order; pass the microbatches of one step as a list",
        )
    if not microbatches:
        raise ConfigError(
            "microbatches", [], "is empty; a step needs at least one microbatch on every rank"
        )


def check_evaluated(microbatches: Any) -> None:
    """Refuse one batch, or something else, where an iterable of microbatches is expected.

    Raises:
        ConfigError: Naming what came in its place.
    """
    _refuse_one_batch(microbatches, SEVERAL)
    if not isinstance(microbatches, Iterable) or isinstance(microbatches, str | bytes):
        raise ConfigError("microbatches", _kind(microbatches), f"holds no batches; {SEVERAL}")


def _refuse_one_batch(microbatches: Any, instead: str) -> None:
    if isinstance(microbatches, Tensor | np.ndarray | Mapping) or hasattr(microbatches, "_fields"):
        raise ConfigError("microbatches", _kind(microbatches), f"is one batch; {instead}")
    if not isinstance(microbatches, list | tuple):
        return
    tensors = [part for part in microbatches[:2] if isinstance(part, Tensor)]
    alike = len({(part.dtype, part.dim()) for part in tensors}) <= 1
    if len(tensors) == 2 and (isinstance(microbatches, tuple) or not alike):
        raise ConfigError(
            "microbatches",
            f"({', '.join(map(_kind, microbatches))})",
            f"looks like one batch, such as (inputs, targets); {instead}",
        )


def check_loss_function(loss: object) -> None:
    """Refuse what cannot be called as `loss(module, batch)`.

    Raises:
        ConfigError: Naming what came in its place.
    """
    name = getattr(loss, "__name__", type(loss).__name__)
    if not callable(loss) or isinstance(loss, type):
        raise ConfigError("loss", name, f"is no function; {LOSS_CALL}")
    if isinstance(loss, nn.modules.loss._Loss):
        raise ConfigError("loss", name, f"is a criterion, which runs no model; {LOSS_CALL}")
    try:
        inspect.signature(loss).bind("module", "batch")
    except TypeError as error:
        raise ConfigError("loss", name, f"{error}; {LOSS_CALL}") from error
    except ValueError:  # a callable of C code does not tell its signature
        return


def check_outcome(outcome: object) -> None:
    """Refuse what is no outcome of a step.

    Raises:
        ConfigError: Naming what came in its place.
    """
    if not isinstance(outcome, StepOutcome):
        raise ConfigError(
            "outcome", _kind(outcome), "is not what engine.step returns; pass that, a StepOutcome"
        )


def check_loss(returned: Any) -> tuple[Tensor, Tensor | float]:
    """Return the loss sum and the weight that a loss function has returned.

    Raises:
        ConfigError: If it is not a differentiable 0-dim loss and a number.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise ConfigError(
            "loss", _kind(returned), f"the loss function returned this; {LOSS_CONTRACT}"
        )
    loss, weight = returned
    if not isinstance(loss, Tensor):
        raise ConfigError(
            "loss",
            _kind(loss),
            "is a value without the graph that backward needs; return the tensor, not loss.item()",
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ConfigError(
            "loss", _kind(loss), "is not one number in floating point; return the sum, loss.sum()"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ConfigError(
            "loss",
            _kind(loss),
            "does not depend on any parameter that is trained; return what the model has computed, "
            "not detached, and multiply it by 0 where there is nothing to learn from",
        )
    if isinstance(weight, Tensor):
        if weight.numel() != 1 or weight.is_complex():
            raise ConfigError("weight", _kind(weight), f"is not one number; {LOSS_CONTRACT}")
        return loss.reshape(()), weight.reshape(())
    if not isinstance(weight, int | float | np.number):
        raise ConfigError("weight", _kind(weight), f"is not a number; {LOSS_CONTRACT}")
    check_weight(float(weight))
    return loss.reshape(()), float(weight)


def check_weight(weight: float) -> None:
    """Refuse a negative weight; one that is not finite counts as an overflow.

    Raises:
        ConfigError: If it is below 0.
    """
    if -math.inf < weight < 0:
        raise ConfigError(
            "weight", weight, "is below 0; return how many samples or tokens were summed"
        )


@contextmanager
def explain_batch_errors(batch: Any, model: nn.Module) -> Iterator[None]:
    """Say what a batch has where the loss function or the model looks for something else.

    Raises:
        ConfigError: In place of a KeyError for a key that the batch does not have, of an IndexError
            for an id above a vocabulary, and of a ValueError for a tensor that is no pair.
    """
    try:
        yield
    except KeyError as error:
        is_of_batch = isinstance(batch, Mapping) and _is_in_sight(batch, error)
        if not is_of_batch or not error.args or error.args[0] in batch:
            raise
        raise ConfigError(
            "batch", list(batch), f"the loss function looks for {error.args[0]!r}"
        ) from error
    except IndexError as error:
        if "out of range in self" not in str(error) and "out of bounds" not in str(error):
            raise
        raise ConfigError(
            "batch",
            _integer_ranges(batch),
            f"an id is too large: {error}; the model has embeddings of {_embedding_sizes(model)} "
            "rows",
        ) from error
    except ValueError as error:
        if not isinstance(batch, Tensor) or "values to unpack" not in str(error):
            raise
        raise ConfigError(
            "microbatches",
            _kind(batch),
            f"is one microbatch, and the loss function unpacks it ({error}); if it is a part of a "
            f"batch, {ONE_LIST}",
        ) from error


@contextmanager
def explain_backward_errors() -> Iterator[None]:
    """Say why the graph of a loss cannot be gone through.

    Raises:
        ConfigError: In place of a RuntimeError for a graph that another backward has freed, or that
            needs parameters which FSDP has freed in between.
    """
    try:
        yield
    except RuntimeError as error:
        if "out of bounds for storage of size 0" in str(error):
            raise ConfigError(
                "loss",
                "Tensor of a second backward",
                "backward runs again through a graph that torch.autograd.grad has used, and the "
                "sharded strategy has freed the parameters in between; use strategy = 'ddp'",
            ) from error
        if "backward through the graph a second time" not in str(error):
            raise
        raise ConfigError(
            "loss",
            "Tensor of a graph that is freed",
            "backward went through it before; the loss function must not call backward, and "
            "computes everything anew for each microbatch (detach a state that it carries over)",
        ) from error


def check_not_inference(doing: str) -> None:
    """Refuse to make tensors that autograd could not use later.

    Raises:
        ConfigError: Inside of `torch.inference_mode`.
    """
    if torch.is_inference_mode_enabled():
        raise ConfigError(
            "torch.inference_mode()", True, f"{doing} needs gradients; do it outside of it"
        )


def check_gradients_enabled() -> None:
    """Refuse a step where autograd records nothing.

    Raises:
        ConfigError: Inside of `torch.no_grad` or `torch.inference_mode`.
    """
    check_not_inference("a step")
    if not torch.is_grad_enabled():
        raise ConfigError("torch.no_grad()", True, "a step needs gradients; do it outside of it")


def check_stop(stop: object) -> None:
    """Refuse a request that is neither made nor not made.

    Raises:
        ConfigError: Naming what came in its place.
    """
    if not isinstance(stop, bool | int | np.bool_):
        raise ConfigError("stop", stop, "must be True or False")


class FirstStep:
    """What is checked in the first step, where a look at values may make the host wait.

    Args:
        world: The ranks, which all have to make the same calls.
        model: Whose embeddings are watched.
    """

    def __init__(self, world: World, model: nn.Module) -> None:
        self._world = world
        self._model = model
        self._narrow: torch.dtype | None = None

    def look_at(self, loss: Tensor, weight: Tensor | float) -> None:
        """Refuse a negative weight, and take note of the dtype that the loss is computed in."""
        check_weight(float(weight))
        self._narrow = self._narrow or _narrow_dtype(loss)

    def narrow_loss(self) -> list[str]:
        """Return a warning if a loss was computed in 16 bits, whatever it was cast to later."""
        if self._narrow is None:
            return []
        return [
            f"the loss is computed in {dtype_name(self._narrow)}, too coarse for a sum over many "
            "samples; compute it outside of the model from FP32 logits (logits.float()), or use "
            f"the policy {dtype_word(self._narrow)}-autocast"
        ]

    @contextmanager
    def watch_ids(self) -> Iterator[None]:
        """Refuse ids above the vocabulary of an embedding before a kernel reads beyond its end.

        Raises:
            ConfigError: Naming the embedding, its size and the id.
        """
        with ExitStack() as hooks:
            for name, part in self._model.named_modules():
                if isinstance(part, nn.Embedding):
                    handle = part.register_forward_pre_hook(_id_check(name, part.num_embeddings))
                    hooks.callback(handle.remove)
            yield

    def warnings(
        self, batch: Any, run: Callable[[Any], tuple[Tensor, Tensor]], *, probe: bool
    ) -> list[str]:
        """Return what is probably not meant, the same on every rank.

        Args:
            batch: First microbatch of this rank.
            run: Runs the forward pass of a batch; returns loss sum and weight.
            probe: Whether the loss may be run on made-up batches; the same on every rank.
        """
        size = _samples(batch) if probe else 0
        digest = float(_digest(batch))
        # The largest and the smallest digest, and the smallest number of samples.
        numbers = torch.tensor([digest, -digest, -float(size)], dtype=torch.float64)
        if self._world.group is not None:
            numbers = numbers.to(self._world.device)
            dist.all_reduce(numbers, dist.ReduceOp.MAX, self._world.group)
        largest, smallest, fewest = numbers.tolist()
        found = []
        if self._world.world_size > 1 and largest == -smallest:
            found.append(
                f"all {self._world.world_size} ranks were given the same first microbatch, so more "
                "ranks learn nothing more; give each rank its own samples (DistributedSampler, or "
                "a seed that depends on the rank)"
            )
        if -fewest >= 2 and _is_mean(batch, size, run):
            found.append(
                "the loss looks like a mean: over twice as many samples the weight doubles and the "
                "loss does not, so the gradient is divided by the weight twice; return the sum "
                "(reduction='sum', or loss * weight)"
            )
        return found


def _narrow_dtype(loss: Tensor) -> torch.dtype | None:
    """Return the 16-bit dtype of a loss, or of the number that it was widened and scaled from."""
    if loss.dtype.itemsize < 4:
        return loss.dtype
    node = loss.grad_fn
    while node is not None:
        (made, *others) = node._input_metadata
        if others or len(made.shape):
            return None
        if made.dtype.itemsize < 4:
            return made.dtype
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def _is_mean(batch: Any, size: int, run: Callable[[Any], tuple[Tensor, Tensor]]) -> bool:
    """Whether the weight of a repeated sample grows with their number, and its loss does not."""
    few, many = (2, 4) if size < 4 else (size // 2, size // 2 * 2)
    try:
        (loss, weight), (more_loss, more_weight) = (
            [float(number) for number in run(_repeated(batch, count))] for count in (few, many)
        )
    except Exception:  # noqa: BLE001  # a loss that cannot take equal samples tells nothing
        return False
    numbers = (loss, weight, more_loss, more_weight)
    if not all(map(math.isfinite, numbers)) or min(loss, weight) <= 0:
        return False
    return more_weight >= 1.9 * weight and more_loss < LEAST_GROWTH * loss


def _repeated(batch: Any, count: int) -> Any:
    """Return a batch that holds the first sample of another one `count` times."""
    return pytree.tree_map_only(
        Tensor,
        lambda tensor: tensor[:1].repeat_interleave(count, 0) if tensor.dim() else tensor,
        batch,
    )


def _samples(batch: Any) -> int:
    """Return the number of samples of a batch of tensors and numbers; 0 if that is not known."""
    leaves = pytree.tree_leaves(batch)
    if not all(isinstance(leaf, Tensor | int | float | None) for leaf in leaves):
        return 0
    sizes = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    return sizes.pop() if len(sizes) == 1 else 0


def _digest(batch: Any) -> int:
    """Return a checksum of the beginning of each tensor of a batch; of each its shape as well."""
    value = 0
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            start = leaf.detach().flatten()[:COMPARED].cpu().contiguous()
            value = zlib.crc32(str(tuple(leaf.shape)).encode(), value)
            value = zlib.crc32(start.view(torch.uint8).numpy().tobytes(), value)
        else:
            value = zlib.crc32(repr(leaf).encode(), value)
    return value


def _id_check(name: str, rows: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def check(module: nn.Module, args: tuple[Any, ...]) -> None:
        ids = args[0] if args else None
        if not isinstance(ids, Tensor) or not ids.numel():
            return
        smallest, largest = (int(value) for value in torch.aminmax(ids))
        if smallest < 0 or largest >= rows:
            raise ConfigError(
                "batch",
                f"ids from {smallest} to {largest}",
                f"the embedding {name!r} has {rows} rows, for ids from 0 to {rows - 1}; enlarge "
                "the vocabulary of the model, or use the tokenizer that it was made for",
            )

    return check


def _is_in_sight(value: Any, error: BaseException) -> bool:
    """Whether the function that raised has `value` among its variables."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and any(found is value for found in place.tb_frame.f_locals.values())


def _integer_ranges(batch: Any) -> str:
    """Return the range of each tensor of integers, by its place in the batch."""
    leaves, _ = pytree.tree_flatten_with_path(batch)
    ranges = [
        f"{pytree.keystr(path)} from {leaf.min().item()} to {leaf.max().item()}".strip()
        for path, leaf in leaves
        if isinstance(leaf, Tensor) and leaf.numel() and not leaf.is_floating_point()
    ]
    return listed(ranges) or "no integers"


def _embedding_sizes(model: nn.Module) -> str:
    sizes = {part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)}
    return ", ".join(map(str, sorted(sizes))) or "unknown numbers of"


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"Tensor of shape {tuple(value.shape)} and {str(value.dtype).removeprefix('torch.')}"
    return f"{type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple) else "")
