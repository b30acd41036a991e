"""Gradients of the global mean over microbatches and ranks with different numbers of tokens."""

from __future__ import annotations

import logging
import math
import warnings

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.errors import ConfigError, TrainingError, require
from distmp.parallel.global_mean import MeanLoss, check_weight, valid_weight
from distmp.scaling.local_gradients import local_gradients
from distmp.scaling.rank_group import RankGroup

logger = logging.getLogger("distmp")

# The loss sum of the first step is divided by this power of two.
_FIRST_UNIT = 1024.0
_USE = "use weighted_loss for every microbatch of every rank, also for an empty one"


class StepWeights:
    """Sums the weights of a step's microbatches, and divides gradients by their mean over ranks.

    Backward runs on the loss sum, so that the gradient of a step is the sum over microbatches,
    averaged over ranks by the strategy. Before the optimizer's step it is divided by the weight of
    all microbatches, averaged over ranks in the same way.

    Attributes:
        in_use: Whether `loss` was ever called for training.
    """

    def __init__(self) -> None:
        self._ranks = RankGroup(None)
        # The loss sum is divided by this power of two, which is exact, so that its gradients are as
        # large as those of a mean loss and fit into 16 bits. The same on all ranks; after the first
        # step, about the weight of a microbatch.
        self._unit = _FIRST_UNIT
        self._optimizer: int | None = None
        self._is_compared = False
        self.in_use = False
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the weights and calls since the last step."""
        self._weight: Tensor | float = 0.0
        self._losses = 0
        self._backwards = 0
        self._divided_by = 1

    def loss(self, loss_sum: Tensor, weight: Tensor | float) -> Tensor:
        """Return the loss of a microbatch; see `MixedPrecision.weighted_loss`."""
        if not (isinstance(loss_sum, Tensor) and loss_sum.dim() == 0):
            shape = tuple(loss_sum.shape) if isinstance(loss_sum, Tensor) else loss_sum
            raise ConfigError("loss_sum", shape, "pass the sum of the losses, a 0-dim tensor")
        weight = weight.detach() if isinstance(weight, Tensor) else weight
        check_weight(weight)
        amount = valid_weight(weight, loss_sum.device)  # NaN is an error of all ranks, in `divide`
        total = loss_sum.detach().double()
        mean = torch.where(amount > 0, total / amount, total).to(loss_sum.dtype)
        if not (torch.is_grad_enabled() and loss_sum.requires_grad):
            return mean
        self.in_use = True
        self._weight = self._weight + amount
        self._losses += 1
        factor = torch.full((), 1 / self._unit, dtype=torch.float64, device=loss_sum.device)
        return MeanLoss.apply(loss_sum, mean, factor)

    def count_backward(self, loss: Tensor, divided_by: int | None = None) -> None:
        """Count the backward of a microbatch; warn if its loss is divided once more.

        Args:
            loss: The loss on which backward is called.
            divided_by: What the framework has divided the result of `weighted_loss` by; None if it
                has not divided it.
        """
        self._backwards += 1
        self._divided_by = divided_by or 1
        node, divisions = loss.grad_fn, 0 if divided_by is None else 1
        while node is not None and node.name() == "DivBackward0":
            node, divisions = node.next_functions[0][0], divisions - 1
        is_weighted = node is not None and node.name() == f"{MeanLoss.__name__}Backward"
        if self.in_use and divisions < 0 and is_weighted:
            warnings.warn(
                "the result of weighted_loss is divided before backward, so gradients are too"
                " small; weighted_loss divides by the weight of all microbatches itself",
                RuntimeWarning,
                stacklevel=2,
            )

    def compare_use(self) -> None:
        """Compare between ranks, in the first step, whether `loss` is in use.

        Otherwise the ranks that use it would wait in `divide` for those that do not.

        Raises:
            TrainingError: On all ranks, if only some of them use it.
        """
        if self._is_compared or not dist.is_initialized():
            return
        self._is_compared = True
        users = float(self._ranks.all_reduce(torch.tensor(float(self.in_use))))
        if users not in (0, self._ranks.world_size):
            raise TrainingError(
                f"{users:g} of {self._ranks.world_size} ranks use weighted_loss in the first step "
                f"(this rank: {'yes' if self.in_use else 'no'}); {_USE}"
            )

    @torch.no_grad()
    def divide(self, optimizer: torch.optim.Optimizer) -> None:
        """Turn the gradients of the sum into those of the mean; waits for the device.

        Args:
            optimizer: The optimizer whose step is next.

        Raises:
            ConfigError: If the weights of a step belong to several optimizers.
            TrainingError: On all ranks, if a backward of any rank had no weight, or the weight of
                any rank is negative or not finite.
        """
        if not self.in_use:
            return
        problem = (
            "is the second optimizer, and it is unknown which weights are those of its gradients; "
            "use weighted_loss with one optimizer, or distmp.Engine"
        )
        is_only = self._optimizer in (None, id(optimizer))
        require(is_only, "weighted_loss", type(optimizer).__name__, problem)
        is_first = self._optimizer is None
        self._optimizer = id(optimizer)
        missing = float(self._losses != self._backwards)
        sums = torch.tensor([float(self._weight), missing, self._losses], dtype=torch.float64)
        weight, ranks_that_miss, microbatches = self._ranks.all_reduce(sums).tolist()
        losses, backwards, divided_by = self._losses, self._backwards, self._divided_by
        self.begin_step()
        if ranks_that_miss:
            raise TrainingError(
                f"on {ranks_that_miss:g} rank(s) the step has a different number of calls of "
                f"weighted_loss than of backward (here: {losses} and {backwards}); {_USE}"
            )
        if not math.isfinite(weight):
            raise TrainingError(
                f"the weight of the step, summed over all ranks, is {weight:g}; weights have to be "
                "finite, and 0 or more: check what weighted_loss gets"
            )
        if microbatches and weight == 0:
            logger.warning(
                "the weight of the step, summed over all ranks, is 0, so its gradient is zero; "
                "check the data, and what weighted_loss gets"
            )
        factor = self._unit * divided_by * self._ranks.world_size / (weight or math.inf)
        for gradient in local_gradients(optimizer):
            gradient.tensor.mul_(factor)
        if is_first:
            self._unit = 2.0 ** math.ceil(math.log2(weight / microbatches)) if weight else 1.0
