"""Trainers of TRL with distmp: token means over ranks, and FP16."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distmp.errors import ConfigError
from distmp.scaling.settings import LossScaleConfig
from tests.integrations.tiny import (
    VOCABULARY,
    arguments,
    batches_of_all_ranks,
    largest_error,
    llama,
    next_tokens,
    recording,
    reference,
    tokenizer,
)
from tests.ranks import ranks, same_on_all_ranks

# Token ids of the tokenizer.
PAD, END = 0, 1


def language_model() -> nn.Module:
    """A model whose predictions are far from uniform, so that rounding shows."""
    ids = {"pad_token_id": PAD, "eos_token_id": END, "bos_token_id": None}
    return llama(hidden_size=64, num_hidden_layers=2, initializer_range=0.15, **ids)


def sentences(number: int) -> Any:
    """Return texts of 2 to 10 words."""
    from datasets import Dataset

    lengths = [2 + (5 * index) % 9 for index in range(number)]
    words = [
        [str((index + k) % (VOCABULARY - 2)) for k in range(n)] for index, n in enumerate(lengths)
    ]
    return Dataset.from_dict({"text": [" ".join(text) for text in words]})


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]


def grpo(path: Path, trainer: type[Any], *, changes: dict[str, Any], **keywords: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig

    prompts = Dataset.from_dict({"prompt": [f"{n % 14} {n % 5}" for n in range(16)]})
    settings = {"num_generations": 4, "max_completion_length": 24, "max_steps": 4, "bf16": False}
    return trainer(
        model=language_model(),
        reward_funcs=reward,
        args=arguments(path, GRPOConfig, **{**settings, **changes}),
        train_dataset=prompts,
        processing_class=tokenizer(),
        **keywords,
    )


@pytest.mark.nightly
@pytest.mark.slow
@ranks(2)
def test_two_ranks_use_mean_of_all_tokens(tmp_path: Path) -> None:
    from trl import GRPOTrainer, SFTConfig, SFTTrainer

    from distmp.integrations.transformers import TrainerMixin

    class Supervised(TrainerMixin, SFTTrainer):  # type: ignore[misc]
        pass

    class Reinforced(TrainerMixin, GRPOTrainer):  # type: ignore[misc]
        pass

    trainer = recording(Supervised)(
        model=language_model(),
        args=arguments(tmp_path, SFTConfig, max_steps=2, bf16=False, learning_rate=0.0),
        train_dataset=sentences(16),
        processing_class=tokenizer(),
    )
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    for (batches, grads), loss in zip(trainer.steps, logged, strict=True):
        wanted, gradient = reference(trainer.before, batches_of_all_ranks(batches), next_tokens)
        assert largest_error(grads, gradient) < 1e-6
        assert loss == pytest.approx(wanted, rel=1e-6)

    _check_policy_gradient(tmp_path, Reinforced)
    _check_fp16(tmp_path, Reinforced)
    with pytest.raises(ConfigError, match="is a mean of the means of microbatches"):
        grpo(tmp_path, Reinforced, changes={"loss_type": "bnpo"})


def _check_policy_gradient(path: Path, trainer: type[Any]) -> None:
    """The gradient of DAPO is that of the mean over the tokens of all microbatches and ranks."""

    class Capturing(trainer):  # type: ignore[misc]
        def compute_loss(self, model: nn.Module, inputs: Any, **keywords: Any) -> Tensor:
            self.captured.append(inputs)
            return super().compute_loss(model, inputs, **keywords)

    Capturing.captured = []
    made = grpo(path, recording(Capturing), changes={"max_steps": 1, "learning_rate": 0.0})
    made.train()
    batches = batches_of_all_ranks(Capturing.captured)
    lengths = [int(batch["completion_mask"].sum()) for batch in batches]
    assert len(lengths) == 4
    assert len(set(lengths)) > 1, "microbatches of one length cannot tell the means apart"
    losses, weight = [], 0
    for batch in batches:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        logits = made.before(input_ids=ids, attention_mask=mask).logits[:, :-1]
        every = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        chosen = every[:, -batch["completion_ids"].size(1) :]
        losses.append(-(chosen * batch["advantages"][:, None] * batch["completion_mask"]).sum())
        weight += int(batch["completion_mask"].sum())
    (sum(losses) / weight).backward()
    gradient = [p.grad for p in made.before.parameters() if p.grad is not None]
    ((_, grads),) = made.steps
    assert largest_error(grads, gradient) < 1e-5


def _check_fp16(path: Path, trainer: type[Any]) -> None:
    """A scale that overflows at first backs off on both ranks, and training continues."""
    rules = LossScaleConfig.for_short_runs(init=2.0**24)
    changes = {"max_steps": 14, "learning_rate": 1e-3, "max_grad_norm": 1.0}
    made = grpo(path, trainer, changes=changes, policy="fp16-autocast", loss_scale=rules)
    before = [parameter.clone() for parameter in made.model.parameters()]
    made.train()
    logs = [entry for entry in made.state.log_history if "loss" in entry]
    skipped, scale = logs[-1]["skipped_steps"], logs[-1]["loss_scale"]
    assert 1 <= skipped < 14
    assert scale == 2.0 ** (24 - skipped)
    after = [*made.model.parameters()]
    assert all(parameter.isfinite().all() for parameter in after)
    assert not all(map(torch.equal, before, after))
    assert same_on_all_ranks(([p.tolist() for p in after], skipped, scale))


@pytest.mark.nightly
@pytest.mark.slow
@ranks(1)
def test_trl_script_trains_equally_with_three_lines(tmp_path: Path) -> None:
    """`trl/scripts/sft.py`, with the lines that docs/transformers.md changes."""
    import trl.scripts.sft

    language_model().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"text": text}) for text in sentences(16)["text"]]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows))

    script = Path(trl.scripts.sft.__file__).read_text()
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    changed = re.search(r"three lines.*?```py\n(.*?)```", page, re.DOTALL)
    assert changed is not None
    lines = [line for line in changed[1].splitlines() if line]
    assert len(lines) == 3
    indented = "\n".join(f"    {line}" for line in lines)
    ours = script.replace("    trainer = SFTTrainer(", indented)
    assert ours.count("TrainerMixin") == 2

    words = f"--model_name_or_path {tmp_path}/model --dataset_name {tmp_path}/data --use_cpu True"
    words += " --bf16 False --per_device_train_batch_size 2 --gradient_accumulation_steps 2"
    words += " --max_steps 3 --logging_steps 1 --report_to none --save_strategy steps"
    words += " --save_steps 3 --disable_tqdm True"
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[variable]  # as `python sft.py` runs it; it destroys its process group
    losses = []
    for name, source in (("theirs", script), ("ours", ours)):
        directory = tmp_path / name
        sys.argv = ["sft.py", *words.split(), "--output_dir", str(directory)]
        exec(compile(source, f"{name}.py", "exec"), {"__name__": "__main__"})
        state = json.loads((directory / "checkpoint-3" / "trainer_state.json").read_text())
        losses.append([entry["loss"] for entry in state["log_history"] if "loss" in entry])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
