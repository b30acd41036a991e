"""Passes the division of parameters over ranks from a strategy to distmp's optimizers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from distmp.errors import ConfigError, require
from distmp.optim.adamw import AdamW
from distmp.optim.muon import Muon
from distmp.parallel import fsdp_internals
from distmp.parallel.strategy import Strategy
from distmp.utils.dtypes import is_dtensor
from distmp.utils.tensor_trees import parameter_name


def place_shards(
    optimizer: torch.optim.Optimizer, strategy: Strategy, names: Mapping[int, str]
) -> None:
    """Set which elements the flat shards of AdamW hold; other optimizers do not change.

    Args:
        optimizer: The optimizer, on the tensors of the strategy.
        strategy: The strategy.
        names: Name of each tensor by its `id`.
    """
    group = strategy.shard_group
    if not isinstance(optimizer, AdamW) or group is None:
        return
    starts: dict[Tensor, int] = {}
    for tensor in (tensor for entry in optimizer.param_groups for tensor in entry["params"]):
        divided = None if is_dtensor(tensor) else strategy.sharded_matrix(names[id(tensor)])
        if divided is not None:
            starts[tensor] = divided.bounds[group.rank()]
    optimizer.shard(starts)


def place_matrices(
    optimizer: torch.optim.Optimizer, strategy: Strategy, names: Mapping[int, str]
) -> None:
    """Set how the matrices of Muon are sharded; other optimizers do not change.

    Args:
        optimizer: The optimizer, on the tensors of the strategy.
        strategy: The strategy.
        names: Name of each tensor by its `id`.

    Raises:
        ConfigError: If Muon has no matrix, or the weight of an embedding.
    """
    if not isinstance(optimizer, Muon):
        return
    matrices = {id(tensor): names[id(tensor)] for tensor in optimizer.matrices}
    _check_hidden([*matrices.values()], strategy.module)
    group = strategy.shard_group
    sharded = {key: strategy.sharded_matrix(name) for key, name in matrices.items()}
    found = {key: matrix for key, matrix in sharded.items() if matrix is not None}
    if found and group is not None:
        optimizer.shard(found, group)


def _check_hidden(names: list[str], model: nn.Module) -> None:
    problem = (
        "finds no hidden matrix among the trained parameters; use adamw, or set "
        "optim.options.adamw to patterns of the matrices that AdamW updates"
    )
    require(bool(names), "optim.name", "muon", problem)
    # By the parameter: the optimizer knows only the first name of one that is tied.
    first: dict[Tensor, str] = {p: parameter_name(name) for name, p in model.named_parameters()}
    for part in model.modules():
        if isinstance(part, nn.Embedding) and (name := first.get(part.weight)) in names:
            problem = (
                f"lacks {name!r}, an embedding, which Muon must not orthogonalize; set it to a "
                f"list of patterns that match embeddings and heads, such as [{name!r}]"
            )
            raise ConfigError("optim.options.adamw", None, problem)


def apply_reduce_dtype(module: nn.Module) -> None:
    """Make FSDP2 reduce gradients over tensor-parallel ranks in the policy's `reduce_dtype`.

    Tensor-parallel ranks hold partial sums of the gradient of a parameter that they replicate,
    such as a norm weight under sequence parallelism. FSDP2 of torch 2.13 adds them in the dtype of
    the gradient; only over data-parallel ranks it uses `MixedPrecisionPolicy.reduce_dtype`
    (pytorch#190626). Call this function once, after `fully_shard` and before training. Blocks with
    such parameters then need memory for their gathered gradients in the reduce dtype, one block at
    a time.

    Args:
        module: A module to which `fully_shard` was applied, with a policy that has a
            `reduce_dtype`.

    Raises:
        ConfigError: If no part of the module has such a policy.
        SetupError: If this version of torch is not supported.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        >>> from distmp.parallel.matrices import apply_reduce_dtype
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> mp_policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        >>> model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh, mp_policy=mp_policy)
        >>> apply_reduce_dtype(model)
        >>> dist.destroy_process_group()
    """
    problem = (
        "has no reduce dtype to apply; call fully_shard() first, with "
        "mp_policy=MixedPrecisionPolicy(..., reduce_dtype=torch.float32)"
    )
    applies = fsdp_internals.reduce_partial_in_reduce_dtype(module)
    require(applies, "module", type(module).__name__, problem)
