"""How far the log-probabilities of a trainer are from those of its rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from trl import GRPOTrainer as _TrainerBase
else:
    _TrainerBase = object


class RolloutMismatchMixin(_TrainerBase):  # type: ignore[misc]
    """Logs the trainer-to-rollout mismatch of a trainer of TRL that generates completions.

    Use it as `class MyTrainer(RolloutMismatchMixin, TrainerMixin, GRPOTrainer)`. For a sampled
    token, `d` is its log-probability in the trainer minus that at sampling. The log shows, over all
    tokens of all ranks since the last entry:

    - `rollout_mismatch/mean`: the mean of `|d|`,
    - `rollout_mismatch/max`: the largest `|d|`,
    - `rollout_mismatch/kl`: the mean of `exp(d) - 1 - d`, an estimate of the Kullback-Leibler
      divergence of the trainer's policy from the sampled one.

    Both use the same weights, so the mismatch is that of rounding and kernels. Each rollout costs
    one more forward. Only `generate` of Transformers is recorded, not vLLM.
    """

    def __init__(self, *positional: Any, **arguments: Any) -> None:
        self._rollout: _Rollout | None = None
        self._mismatches: list[Tensor] = []
        super().__init__(*positional, **arguments)

    def train(self, *positional: Any, **arguments: Any) -> Any:
        """Train, and record what `generate` of the model samples."""
        generate = self.model.generate

        def recorded(*inputs: Any, **options: Any) -> Any:
            return self._generate_and_record(generate, *inputs, **options)

        with mock.patch.object(self.model, "generate", recorded):
            return super().train(*positional, **arguments)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *positional: Any, **arguments: Any
    ) -> Any:
        """Compare the last rollout before its first update, then compute the loss."""
        if self._rollout is not None:
            self._mismatches.append(self._mismatch(model, self._rollout))
            self._rollout = None
        return super().compute_loss(model, inputs, *positional, **arguments)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log numbers of the trainer and the mismatch."""
        if "loss" in logs and self._mismatches:
            sums = torch.stack(self._mismatches)
            absolute, divergence, tokens = sums[:, :3].sum(0).tolist()
            logs["rollout_mismatch/mean"] = absolute / max(tokens, 1)
            logs["rollout_mismatch/max"] = sums[:, 3].max().item()
            logs["rollout_mismatch/kl"] = divergence / max(tokens, 1)
            self._mismatches.clear()
        super().log(logs, start_time)

    def _generate_and_record(self, generate: Any, *inputs: Any, **options: Any) -> Any:
        from transformers import LogitsProcessorList

        recorder = _SampledLogProbabilities(self.temperature)
        processors = [*(options.pop("logits_processor", None) or ()), recorder]
        sequences = generate(*inputs, logits_processor=LogitsProcessorList(processors), **options)
        if self.model.training:
            sampled = recorder.finish(sequences)
            self._rollout = _Rollout(sequences, options["attention_mask"], sampled)
        return sequences

    @torch.no_grad()
    def _mismatch(self, model: nn.Module, rollout: _Rollout) -> Tensor:
        """Return the sums of `|d|` and of the divergence, the number of tokens, and the largest."""
        tokens = rollout.sampled.size(1)
        completions = rollout.sequences[:, -tokens:]
        ends = torch.isin(completions, torch.tensor(self.eos_token_ids, device=completions.device))
        counts = (ends.cumsum(1) - ends.int()) == 0  # up to and including the first end
        attention = torch.cat([rollout.prompt_mask, counts.to(rollout.prompt_mask.dtype)], dim=1)
        trained = self._get_per_token_logps_and_entropies(
            model, rollout.sequences, attention, tokens, batch_size=self._train_batch_size
        )[0]
        difference = (trained - rollout.sampled).double()[counts]
        divergence = difference.expm1() - difference
        local = torch.stack(
            [difference.abs().sum(), divergence.sum(), counts.sum(), difference.abs().max()]
        )
        of_ranks = self.accelerator.gather(local[None])
        return torch.cat([of_ranks[:, :3].sum(0), of_ranks[:, 3:].amax(0)])


class _Rollout(NamedTuple):
    """Prompts and completions, the mask of the prompts, and log-probabilities of completions."""

    sequences: Tensor
    prompt_mask: Tensor
    sampled: Tensor


class _SampledLogProbabilities:
    """A logits processor that keeps the log-probability of each sampled token.

    It does not change the logits. `generate` calls processors before it divides the logits by the
    temperature.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._previous: Tensor | None = None
        self._sampled: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._take_last(input_ids)
        self._previous = (scores.float() / self._temperature).log_softmax(-1)
        return scores

    def finish(self, sequences: Tensor) -> Tensor:
        """Return the log-probabilities, of shape (sequences, sampled tokens)."""
        self._take_last(sequences)
        return torch.cat(self._sampled, dim=1)

    def _take_last(self, input_ids: Tensor) -> None:
        if self._previous is not None:
            self._sampled.append(self._previous.gather(1, input_ids[:, -1:]))
