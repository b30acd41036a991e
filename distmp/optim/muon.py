"""Muon for hidden matrices and AdamW for all other parameters, in one optimizer.

Muon (https://kellerjordan.github.io/posts/muon/) orthogonalizes the momentum of a matrix. That
needs the full matrix, so the shards of a matrix are sent to one rank, its owner, and the shards of
the result are sent back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.errors import ConfigError, listed, nearest, require
from distmp.optim.adamw import match_memory_formats, store
from distmp.optim.owners import Owners, ShardedMatrix
from distmp.precision.keep import product_switches
from distmp.precision.policy import PRESETS
from distmp.scaling.norms import chunk_norms
from distmp.scaling.step_decision import PRESCALE
from distmp.utils.dtypes import is_dtensor, local_values

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Embeddings and heads, whose rows are classes and not directions of a hidden space, by components
# of their names. Hidden matrices in numbered blocks have some of these names: `h.0.mlp.fc_out`.
_OUTSIDE_OF_BLOCKS = r"([^.\d][^.]*\.)*"
NOT_HIDDEN = (
    r"(.*\.)?([^.]*embed[^.]*|wte|wpe|[^.]*classifier[^.]*|score)(\..*)?",
    r"(.*\.)?([^.]*_)?(emb|head|logits)(\..*)?",
    _OUTSIDE_OF_BLOCKS + r"(([^.]*_)?heads|shared)\..*",
    _OUTSIDE_OF_BLOCKS + r"(output|decoder|fc_out)\.weight",
)
ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
    # Keller Jordan; torch's default.
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    # The update has the RMS of AdamW's (https://arxiv.org/abs/2502.16982).
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
FSDP1 = (
    "needs the shapes of matrices, but {!r} is managed by FSDP1, whose shards have none; use FSDP2 "
    "(fully_shard) with distmp.Engine, or AdamW for the group (muon=False)"
)
# The Newton-Schulz iteration of torch.optim.Muon.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_LEAST_NORM = 1e-7
# Attributes of `Muon` that its copies have, too.
_COPIED = ("_adamw", "_muon_defaults", "_adamw_patterns", "_ns_dtype", "_step_supports_amp_scaling")
NS_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Muon(torch.optim.Optimizer):
    """Updates hidden matrices with Muon, and embeddings, heads, vectors and the rest with AdamW.

    The update of a matrix is that of `torch.optim.Muon`. In the engine it is the same for any
    number of ranks and any strategy, up to the rounding of `ns_dtype`. Without the engine, call
    `shard` for sharded matrices; a step refuses shards whose division is not set. It unscales
    gradients and skips steps on the device, as torch's fused optimizers do.

    Args:
        params: `[(name, tensor), ...]`, or groups of those. A group may set `muon`: True for
            Muon, False for AdamW for all of its tensors.
        lr: Learning rate of Muon and AdamW.
        weight_decay: Decoupled weight decay of Muon and AdamW.
        momentum: Nesterov momentum of Muon.
        adjust_lr_fn: How the learning rate of a matrix depends on its shape: "match_rms_adamw", for
            which AdamW's learning rates fit, or "original".
        ns_dtype: Dtype of the iterations. "fp32", never TF32: updates agree between numbers
            of ranks to 1e-5. "bf16", as torch's Muon: faster on GPUs and half the communication,
            but a difference in the last bit of a gradient changes the update by about 1%.
        adamw: Patterns of the names of matrices that AdamW updates; None: the usual names of
            embeddings and heads. `describe` returns which matrices these are.
        adamw_lr: Learning rate of AdamW; None: `lr`.
        betas: Coefficients of AdamW's moments.
        fused: Whether to unscale and skip on the device.

    Raises:
        ConfigError: If an argument is out of range, or a tensor has no name or is managed by FSDP1.

    Example:
        >>> import torch
        >>> from distmp.optim import Muon
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8))
        >>> optimizer = Muon(model.named_parameters(), lr=1e-3)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> len(optimizer.matrices)
        2
    """

    # Set by `shard` for its tensors, so a copy of the optimizer starts without them.
    _shards: Mapping[int, ShardedMatrix] = {}
    _group: dist.ProcessGroup | None = None
    # The matrices that have a gradient, and their owners; the same ones on all ranks.
    _owners: tuple[list[int], Owners] | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        adjust_lr_fn: str = "match_rms_adamw",
        ns_dtype: str = "fp32",
        adamw: Sequence[str] | None = None,
        adamw_lr: float | None = None,
        betas: Sequence[float] = (0.9, 0.999),
        fused: bool = True,
    ) -> None:
        _check(momentum, adjust_lr_fn, ns_dtype, adamw)
        # Its parameters are replaced in each step.
        self._adamw = torch.optim.AdamW(
            [torch.zeros(1)],
            lr=lr if adamw_lr is None else adamw_lr,
            betas=(betas[0], betas[1]),
            weight_decay=weight_decay,
            fused=fused,
        )
        self._muon_defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "adjust_lr_fn": adjust_lr_fn,
            "fused": fused,
        }
        self._adamw_patterns = adamw
        self._step_supports_amp_scaling = fused
        self._ns_dtype = NS_DTYPES[ns_dtype]
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _COPIED}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            match_memory_formats(group["params"], self.state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add tensors with their names; Muon updates the hidden matrices, AdamW the rest.

        Args:
            param_group: A group as in torch, or one of another `Muon`.

        Raises:
            ConfigError: If a tensor has no name, or Muon shall update one that is not a matrix.
        """
        if "muon" in param_group and "param_names" in param_group:
            super().add_param_group(param_group)
            return
        for part in _divided(param_group, self._adamw_patterns):
            defaults = self._muon_defaults if part["muon"] else self._adamw.defaults
            super().add_param_group({**defaults, **part})

    @property
    def matrices(self) -> list[Tensor]:
        """The tensors that Muon updates."""
        return [
            tensor for group in self.param_groups if group["muon"] for tensor in group["params"]
        ]

    def describe(self) -> str:
        """Return which tensors Muon and AdamW update."""
        others = [
            (name, tensor)
            for group in self.param_groups
            if not group["muon"]
            for name, tensor in zip(group["param_names"], group["params"], strict=True)
        ]
        matrices = [name for name, tensor in others if tensor.dim() == 2]
        excluded = f", including the matrices {listed(matrices)}" if matrices else ""
        count = len(self.matrices)
        return f"Muon updates {count} matrices, AdamW {len(others)} other tensors{excluded}"

    def shard(self, matrices: Mapping[int, ShardedMatrix], group: dist.ProcessGroup) -> None:
        """Set how matrices are divided over ranks; every rank holds all others in full.

        Args:
            matrices: Shape and division of each sharded matrix, by the `id` of its tensor.
            group: The ranks that share the matrices.
        """
        self._shards, self._group = matrices, group
        self._owners = None

    @property
    def exchanges(self) -> bool:
        """Whether `step` exchanges shards of matrices, so that every rank has to call it."""
        return bool(self._shards)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: Computes the loss again; optional, as in torch.

        Raises:
            ConfigError: If a matrix is a shard, and `shard` has not set how it is divided.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.step_matrices()
        self._step_adamw()
        return loss

    def _step_adamw(self) -> None:
        self._adamw.param_groups = [group for group in self.param_groups if not group["muon"]]
        self._adamw.state = self.state
        for name in ("grad_scale", "found_inf"):  # GradScaler removes them after each step
            setattr(self._adamw, name, getattr(self, name, None))
        self._adamw.step()

    @torch.no_grad()
    @product_switches(PRESETS["fp32"])
    def step_matrices(self) -> None:
        """Update the matrices, with FP32 products of full precision; runs no hooks."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        skip = None if found_inf is None else found_inf != 0
        work = [
            _Matrix(tensor, group, skip)
            for group in self.param_groups
            if group["muon"]
            for tensor in group["params"]
            if tensor.grad is not None
        ]
        exchanged = [matrix for matrix in work if id(matrix.tensor) in self._shards]
        own = [matrix for matrix in work if id(matrix.tensor) not in self._shards]
        _check_whole(matrix.tensor for matrix in own)
        for matrix in own:
            direction = self._direction(matrix).to(self._ns_dtype)
            matrix.update(orthogonalized(direction))
        if exchanged and self._group is not None:
            self._exchange(exchanged, self._group)

    def _exchange(self, work: list[_Matrix], group: dist.ProcessGroup) -> None:
        def shard(index: int) -> Tensor:
            return self._direction(work[index]).reshape(-1).to(self._ns_dtype)

        ids = [id(matrix.tensor) for matrix in work]
        matrices = [self._shards[key] for key in ids]
        if self._owners is None or self._owners[0] != ids:
            costs = [_cost(*matrix.shape) for matrix in matrices]
            self._owners = ids, Owners(matrices, costs, group)
        for index, update in self._owners[1].compute(shard, orthogonalized):
            work[index].update(update, matrices[index].shape)

    def _direction(self, matrix: _Matrix) -> Tensor:
        """Update the momentum of this rank's part of a matrix; return the part to orthogonalize."""
        state = self.state[matrix.tensor]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix.tensor, requires_grad=False)
        assert matrix.tensor.grad is not None
        gradient = local_values(matrix.tensor.grad)
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            gradient = gradient / scale
        old, momentum = local_values(state["momentum_buffer"]), matrix.group["momentum"]
        new = old.lerp(gradient, 1 - momentum)
        store(old, new, matrix.skip)
        return gradient.lerp(new, momentum)


class _Matrix(NamedTuple):
    """A matrix in one step, or this rank's shard of it.

    Attributes:
        tensor: The tensor that the optimizer updates.
        group: Its parameter group.
        skip: Whether the step is skipped, 0-dim bool on the device; None: it is applied.
    """

    tensor: Tensor
    group: dict[str, Any]
    skip: Tensor | None

    def update(self, direction: Tensor, shape: torch.Size | None = None) -> None:
        """Decay the weights and move them against the direction.

        Args:
            direction: This rank's elements of the orthogonalized matrix.
            shape: Shape of the full matrix; None: that of the tensor.
        """
        weights, group = local_values(self.tensor), self.group
        ratio = ADJUSTMENTS[group["adjust_lr_fn"]](*(shape or weights.shape))
        direction = direction.view_as(weights).to(weights)
        decayed = weights * (1 - group["lr"] * group["weight_decay"])
        store(weights, decayed - direction * (group["lr"] * ratio), self.skip)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return a matrix with about the same singular vectors, and with singular values near 1.

    The Newton-Schulz iteration of Muon, as in https://github.com/KellerJordan/Muon and
    `torch.optim.Muon`, in the dtype of the matrix.

    Args:
        matrix: Floating point, 2-dim.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    norm = chunk_norms([x]).norm().clamp(min=_LEAST_NORM)
    # A power of two, so that a norm beyond FP32 fits, too.
    x = x * PRESCALE / (norm * PRESCALE).to(x.dtype)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def is_hidden(name: str, tensor: Tensor, adamw: Sequence[str] | None = None) -> bool:
    """Return whether Muon updates a tensor: a matrix that is neither an embedding nor a head.

    Args:
        name: Name of the tensor.
        tensor: The tensor.
        adamw: Patterns of the names of embeddings and heads; None: their usual names.
    """
    if adamw is None:
        excluded = any(re.fullmatch(pattern, name) for pattern in NOT_HIDDEN)
    else:
        excluded = any(fnmatchcase(name, pattern) for pattern in adamw)
    return tensor.dim() == 2 and tensor.numel() > 0 and not excluded


def _cost(rows: int, columns: int) -> float:
    """Return the number of multiplications of one iteration."""
    small, large = sorted((rows, columns))
    return float(small * small * (2 * large + small))


def _check_whole(tensors: Iterable[Tensor]) -> None:
    """Refuse shards of matrices, on all ranks: each would orthogonalize only its shard.

    Raises:
        ConfigError: If a tensor is a flat shard or a sharded DTensor.
    """
    for tensor in tensors:
        if tensor.dim() != 2 or (is_dtensor(tensor) and _is_divided(tensor)):
            raise ConfigError(
                "optimizer",
                "Muon",
                f"has a shard of a matrix, {tuple(tensor.shape)}, and does not know how it is "
                "divided; train with distmp.Engine, which sets it, or call Muon.shard",
            )


def _is_divided(tensor: DTensor) -> bool:
    # Not by the size of the shard: all ranks have to agree, and one may have all rows.
    places = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return any(size > 1 and not placement.is_replicate() for placement, size in places)


def _divided(group: Mapping[str, Any], adamw: Sequence[str] | None) -> list[dict[str, Any]]:
    """Divide a group into the tensors that Muon updates and the others."""
    parts: dict[bool, list[tuple[str, Tensor]]] = {True: [], False: []}
    entries = group["params"]
    nameless = (
        "needs the names of its tensors to tell hidden matrices from embeddings and heads; pass "
        "[(name, tensor), ...], such as model.named_parameters()"
    )
    for entry in [entries] if isinstance(entries, Tensor) else entries:
        named = isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)
        require(named, "optimizer", "Muon", nameless)
        name, tensor = entry
        whole = group.get("muon") is False or not getattr(tensor, "_fsdp_flattened", False)
        require(whole, "optimizer", "Muon", FSDP1.format(name))
        hidden = group.get("muon", is_hidden(name, tensor, adamw))
        problem = (
            f"orthogonalizes matrices, but {name!r} has the shape {tuple(tensor.shape)}; "
            "leave it to AdamW (muon=False)"
        )
        require(tensor.dim() == 2 or not hidden, "optimizer", "Muon", problem)
        parts[hidden].append((name, tensor))
    return [{**group, "params": part, "muon": muon} for muon, part in parts.items() if part]


def _check(momentum: float, adjust_lr_fn: str, ns_dtype: str, adamw: Sequence[str] | None) -> None:
    """Refuse values that the optimizer cannot use.

    Raises:
        ConfigError: If a value is invalid; it names the option.
    """
    hint = "use a number of at least 0 and less than 1"
    require(0 <= momentum < 1, "optim.options.momentum", momentum, hint)
    choices = (("adjust_lr_fn", adjust_lr_fn, ADJUSTMENTS), ("ns_dtype", ns_dtype, NS_DTYPES))
    for name, value, known in choices:
        require(value in known, f"optim.options.{name}", value, nearest(value, known))
    hint = f"use a list of patterns: [{adamw!r}]"
    require(not isinstance(adamw, str), "optim.options.adamw", adamw, hint)
