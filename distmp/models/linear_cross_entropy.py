"""Computes the cross entropy of a linear layer's outputs in chunks of rows.

With a vocabulary of 131,072, the logits of 16,384 tokens take 8 GiB in FP32, and autograd holds
several tensors of that size. Here they exist for one chunk of tokens at a time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from distmp.data import IGNORED
from distmp.errors import ConfigError
from distmp.utils.autograd import refuse_second_derivatives

Backend = str | Callable[..., Any]
"""Backend of `torch.compile`: its name, or a function."""

_Compute = Callable[[Tensor, Tensor, int, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]

# Smallest number of tokens in a chunk: with fewer, the matrix products are slower.
MIN_ROWS = 256
# In 16 bits, tensor cores need rows that begin at a multiple of so many elements.
_ALIGNMENT = 8
# Largest number of token ids in one product of weight gradients, which allocates its result.
MAX_TOKEN_IDS = 2**15

# Note [Gradients in forward]
# While the logits of a chunk exist, the gradients of both factors take two more matrix
# products; backward only multiplies them by the gradient of the sum. Computing the logits again in
# backward would take a fourth product.
#
# FP16 has to compute them again: before the multiplication by the loss scale, gradients of logits
# are below the range of FP16.


# Note [What is compiled]
#
# torch.compile turns all that follows the product of a chunk (softmax, loss, gradient of the
# logits) into kernels that read the logits in their own dtype, so that the FP32 logits do not exist
# in memory. The loop over chunks stays outside: compiled, it would be unrolled, and every number of
# tokens would need another graph.


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, backend: Backend | None = None
) -> Tensor:
    """Return the cross entropy of the logits `hidden @ weight.T`, summed over the targets.

    The logits have the dtype that `torch.nn.functional.linear` would give them, and the softmax is
    computed in FP32. The sum over tokens in the gradient of `weight` is in FP32. The result can be
    differentiated once.

    Args:
        hidden: [..., dimension], floating-point.
        weight: [vocabulary, dimension].
        targets: int64 [...]; `IGNORED` ones do not count.
        backend: Backend of `torch.compile` for the computation of each chunk; None: not compiled.

    Returns:
        The sum in nats, FP32, 0-dim.

    Raises:
        ConfigError: See `check_targets`.

    Example:
        >>> import torch
        >>> from distmp.models.linear_cross_entropy import linear_cross_entropy
        >>> hidden, weight, targets = torch.ones(3, 4), torch.ones(5, 4), torch.tensor([0, 1, 2])
        >>> loss_sum = linear_cross_entropy(hidden, weight, targets)
        >>> torch.allclose(loss_sum, 3 * torch.tensor(5.0).log())
        True
    """
    check_targets(targets, (*hidden.shape[:-1], len(weight)))
    kind = hidden.device.type
    # The meta device, on which work is counted, has no autocast.
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if casts else None
    with torch.autocast(kind, enabled=False) if casts else contextlib.nullcontext():
        return _LinearCrossEntropy.apply(
            hidden.flatten(0, -2),
            weight,
            targets.flatten(),
            dtype,
            torch.is_grad_enabled(),
            _compute_chunk if backend is None else _compiled_chunk(backend),
        )


def project(
    x: Tensor, weight: Tensor, targets: Tensor | None, backend: Backend | None = None
) -> Tensor:
    """Return logits, or their cross entropy with targets as a sum."""
    if targets is None:
        return F.linear(x, weight)
    return linear_cross_entropy(x, weight, targets, backend)


def check_targets(targets: Tensor, logits_shape: tuple[int, ...]) -> None:
    """Refuse targets of another shape than the logits, and targets outside of the vocabulary.

    On a GPU, a comparison of values would make the host wait. There, a kernel of the loss stops the
    process.

    Args:
        targets: int64 of any shape.
        logits_shape: [..., vocabulary]; the targets have its shape without the last dimension, or
            one of the two is flat.

    Raises:
        ConfigError: With both shapes, or with the range of the targets and the size of the
            vocabulary.
    """
    tokens, vocabulary_size = torch.Size(logits_shape[:-1]), logits_shape[-1]
    is_flat = 1 in (len(tokens), targets.dim()) and tokens.numel() == targets.numel()
    if tokens != targets.shape and not is_flat:
        raise ConfigError(
            "targets",
            f"shape {tuple(targets.shape)}",
            f"the logits have shape {tuple(logits_shape)}; use logits [batch, time, vocabulary], "
            "and inputs and targets of one shape, [batch, time]",
        )
    fake = isinstance(targets, FakeTensor) or torch.compiler.is_compiling()
    if targets.device.type != "cpu" or fake or not targets.numel():
        return
    ids = targets.where(targets != IGNORED, 0)
    smallest, largest = (int(target) for target in torch.aminmax(ids))
    if smallest < 0 or largest >= vocabulary_size:
        raise ConfigError(
            "batch",
            f"targets from {smallest} to {largest}",
            f"the model returns logits of {vocabulary_size} token ids, for targets from 0 to "
            f"{vocabulary_size - 1}, and {IGNORED} for tokens without a target; correct the "
            "targets, or enlarge the vocabulary of the model (model.options.vocabulary_size)",
        )


class LossHead(nn.Linear):
    """The last layer of a language model, which returns the loss if there are targets."""

    own_group = True  # see `distmp.parallel.fsdp_setup.shard`
    targets: Tensor | None = None
    loss_backend: Backend | None = None

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits [..., vocabulary], or the loss sum for targets, FP32, 0-dim.

        Args:
            hidden: [..., dimension].
            targets: int64 [...]; None: those of the attribute.
        """
        targets = self.targets if targets is None else targets
        return project(hidden, self.weight, targets, self.loss_backend)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        dtype: torch.dtype | None,
        grad: bool,
        compute: _Compute,
    ) -> Tensor:
        ctx.dtype, ctx.compute = dtype, compute
        ctx.needed = [grad and needed for needed in ctx.needs_input_grad[:2]]
        recompute = (dtype or hidden.dtype) == torch.float16
        now = any(ctx.needed) and not recompute
        product = _Product(hidden, weight, dtype, ctx.needed if now else [False, False])
        one = torch.ones((), dtype=torch.float32, device=hidden.device) if now else None
        loss_sum = product.loss_sum(compute, targets, one)
        ctx.gradients = product.gradients if now else None
        if recompute:
            ctx.save_for_backward(hidden, weight, targets)
        return loss_sum

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives(
            "linear_cross_entropy has no second derivatives; use "
            "torch.nn.functional.cross_entropy of the logits"
        )
        if ctx.saved_tensors:
            hidden, weight, targets = ctx.saved_tensors
            product = _Product(hidden, weight, ctx.dtype, ctx.needed)
            product.loss_sum(ctx.compute, targets, scale)
            return (*product.gradients, None, None, None, None)
        if ctx.gradients is None:
            raise RuntimeError("this loss has been differentiated already; compute it again")
        gradients, ctx.gradients = ctx.gradients, None
        for gradient in gradients:
            if gradient is not None:
                gradient *= scale.reshape(1)  # of 1 dimension: 16 bits do not round it
        return (*gradients, None, None, None, None)


class _Product:
    """The product of `hidden` and `weight`, and the gradients of both, one chunk of rows at a time.

    Args:
        hidden: [rows, dimension].
        weight: [vocabulary, dimension].
        dtype: Dtype of the factors; None: unchanged.
        needed: Whether the gradients of `hidden` and of `weight` are needed.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, dtype: torch.dtype | None, needed: list[bool]
    ) -> None:
        self._hidden, self._weight = hidden, weight
        self._dtype = dtype
        self.weight = weight.detach().to(dtype or weight.dtype)
        self._on_tensor_cores = hidden.is_cuda and self.weight.dtype.itemsize == 2
        padding = -len(weight) % _ALIGNMENT
        if self._on_tensor_cores and padding:  # `pad` would copy the weight in any case
            self.weight = F.pad(self.weight, (0, 0, 0, padding))
        self._of_hidden = torch.empty_like(hidden) if needed[0] else None
        self._of_weight = torch.zeros_like(self.weight, dtype=torch.float32) if needed[1] else None

    def loss_sum(self, compute: _Compute, targets: Tensor, scale: Tensor | None) -> Tensor:
        """Return the loss sum of all rows, and add their gradients unless `scale` is None."""
        loss_sum = torch.zeros((), dtype=torch.float32, device=self._hidden.device)
        for rows in self.chunks():
            loss, gradient = compute(
                self.part(rows), self.weight, len(self._weight), targets[rows], scale
            )
            loss_sum += loss
            if gradient is not None:
                self.add(rows, gradient)
            del gradient  # before the next logits
        return loss_sum

    def chunks(self) -> Iterator[slice]:
        """Yield ranges of rows whose logits are about as large as `hidden` or the weight.

        Each chunk reads and writes the FP32 gradient of the weight. With as many rows as the hidden
        states have elements, this takes a few percent of the time of the matrix products.
        """
        dimension = self._hidden.shape[1]
        rows = max(MIN_ROWS, dimension, self._hidden.numel() // len(self._weight))
        for start in range(0, len(self._hidden), rows):
            yield slice(start, start + rows)

    def part(self, rows: slice) -> Tensor:
        """Return some rows of `hidden`, in the dtype of the product."""
        part = self._hidden[rows]
        return part if self._dtype is None else part.to(self._dtype)

    def add(self, rows: slice, gradient: Tensor) -> None:
        """Add the gradients of some rows.

        Args:
            rows: The rows.
            gradient: The gradient of their product, in the dtype of the product.
        """
        if self._of_hidden is not None:
            self._of_hidden[rows] = gradient @ self.weight
        if self._of_weight is None:
            return
        part = self.part(rows)
        if self._on_tensor_cores:
            torch.addmm(
                *(self._of_weight, gradient.T, part),
                out_dtype=torch.float32,
                out=self._of_weight,
            )
            return
        for of_weight, of_logits in zip(
            self._of_weight.split(MAX_TOKEN_IDS), gradient.split(MAX_TOKEN_IDS, 1), strict=True
        ):
            if of_logits.dtype == torch.float32:
                # torch's FlopCounterMode does not count `addmm_`.
                torch.addmm(of_weight, of_logits.T, part, out=of_weight)
            else:
                # The product of a chunk is rounded to 16 bits; the sum of products is not.
                of_weight += of_logits.T @ part

    @property
    def gradients(self) -> list[Tensor | None]:
        """The gradients of `hidden` and `weight`, in their dtypes."""
        of_weight = self._of_weight
        return [
            self._of_hidden,
            None if of_weight is None else of_weight[: len(self._weight)].to(self._weight.dtype),
        ]


def _compute_chunk(
    hidden: Tensor, weight: Tensor, vocabulary_size: int, targets: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the loss sum of a chunk, FP32, 0-dim, and the gradient of its logits.

    Args:
        hidden: [rows, dimension].
        weight: [token ids, dimension], in the same dtype. The rows after `vocabulary_size` are
            zeros, and so is the gradient of their logits.
        vocabulary_size: Number of token ids that exist.
        targets: int64 [rows].
        scale: Factor of the gradient, 0-dim; None: without the gradient.
    """
    product = F.linear(hidden, weight)
    logits = product[:, :vocabulary_size]
    log_softmax, counts = F.log_softmax(logits.float(), -1), targets != IGNORED
    # Another target below 0 stays an index out of bounds, which torch reports.
    targets = targets.where(counts, 0)[:, None]
    loss = -log_softmax.gather(-1, targets)[:, 0].where(counts, 0.0).sum()
    if scale is None:
        return loss, None
    # In place, and into the memory of the logits: these are the largest tensors.
    gradient = log_softmax.exp_()
    gradient.scatter_add_(-1, targets, gradient.new_full(targets.shape, -1.0))
    torch.mul(gradient, (counts * scale)[:, None], out=logits)
    return loss, product


@functools.cache
def _compiled_chunk(backend: Backend) -> _Compute:
    return torch.compile(_compute_chunk, backend=backend)
