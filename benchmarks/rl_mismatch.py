"""Measure the trainer-to-rollout mismatch of GRPO per dtype: `python -m benchmarks.rl_mismatch`.

TRL's GRPOTrainer with distmp trains a language model with random weights, under each policy from
the same weights and prompts. `generate` of transformers samples the completions one token at a
time, with a cache; the trainer computes the log-probabilities of the same tokens in one forward,
with the same weights. `benchmarks.rollout_mismatch` compares both at every step.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import tempfile
from typing import Any

import torch

from benchmarks.report import machine, save
from benchmarks.tables import rollouts as tables

POLICIES = ("fp32", "bf16-autocast", "fp16-autocast")
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    # Larger than for training from scratch: predictions as far from uniform as those of a trained
    # model.
    "initializer_range": 0.08,
}
SEQUENCES, PER_PROMPT, TOKENS = 8, 4, 48
_PACKAGES = ("torch", "transformers", "trl")
_PREFIX = "rollout_mismatch/"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=6, help="steps per policy (default: 6)")
    steps = options.parse_args().steps
    torch.set_num_threads(1)  # the order of sums depends on the number of threads
    result = {
        "machine": machine("cpu"),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "model": MODEL,
        "sequences": SEQUENCES,
        "tokens": TOKENS,
        "steps": steps,
        "policies": {policy: train(policy, steps) for policy in POLICIES},
    }
    print(tables.rl_mismatch(result))
    print(f"saved to {save('rl-mismatch-cpu', result)}")
    return 0


def train(policy: str, steps: int) -> dict[str, list[float]]:
    """Train under a policy; return the numbers of every step, by name."""
    from datasets import Dataset
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from benchmarks.rollout_mismatch import RolloutMismatchMixin
    from distmp.integrations.transformers import TrainerMixin
    from distmp.scaling.settings import LossScaleConfig

    class Trainer(RolloutMismatchMixin, TrainerMixin, GRPOTrainer):  # type: ignore[misc]
        pass

    torch.manual_seed(0)
    ids: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    prompts = [" ".join(str((n + k) % 500) for k in range(4 + n % 5)) for n in range(64)]
    with tempfile.TemporaryDirectory(prefix="rl-mismatch-") as directory:
        trainer = Trainer(
            model=Qwen2ForCausalLM(Qwen2Config(**MODEL, **ids)),
            reward_funcs=_distinct_words,
            args=GRPOConfig(
                directory,
                use_cpu=True,
                bf16=False,
                per_device_train_batch_size=SEQUENCES,
                num_generations=PER_PROMPT,
                max_completion_length=TOKENS,
                max_steps=steps,
                learning_rate=1e-4,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                seed=0,
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=_tokenizer(MODEL["vocab_size"]),
            policy=policy,
            loss_scale=LossScaleConfig.for_short_runs() if "fp16" in policy else None,
        )
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if f"{_PREFIX}mean" in entry]
    names = {"mean", "max", "kl"}
    found = {name: [float(entry[_PREFIX + name]) for entry in logs] for name in sorted(names)}
    return {**found, "entropy": [float(entry["entropy"]) for entry in logs]}


def _distinct_words(completions: list[str], **_: Any) -> list[float]:
    """The reward: the number of distinct words of a completion."""
    return [float(len(set(completion.split()))) for completion in completions]


def _tokenizer(vocabulary: int) -> Any:
    """Return a tokenizer of numbers; nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *map(str, range(vocabulary - 2))]
    fast = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="0"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>")


if __name__ == "__main__":
    sys.exit(main())
