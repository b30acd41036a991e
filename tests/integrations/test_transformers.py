"""Trainers of Transformers with distmp, against float64 and against Transformers' own Trainer."""

from __future__ import annotations

import copy
import functools
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import default_collate

import distmp
from benchmarks.figures import ROOT
from distmp.errors import ConfigError, TrainingError
from distmp.scaling.settings import LossScaleConfig
from tests.integrations.tiny import (
    Loss,
    Sentences,
    WithoutLossKeywords,
    arguments,
    batches_of_all_ranks,
    bert,
    largest_error,
    llama,
    mean_of_microbatch,
    next_tokens,
    positions,
    recording,
    reference,
    same_tokens,
    squares,
    sum_over_items,
)
from tests.ranks import ranks, same_on_all_ranks
from tests.torchrun import python, run

RULES = LossScaleConfig(init=2.0**8)


MASKED = "BertForMaskedLM"
# model, reference, data, further arguments of the trainer, and whether Transformers is right
CASES: dict[str, tuple[Callable[[], nn.Module], Loss, str, dict[str, Any], bool]] = {
    "Llama": (llama, next_tokens, "labels", {}, True),
    "BERT": (lambda: bert(MASKED), same_tokens, "labels", {}, False),
    "regression": (
        lambda: bert("BertForSequenceClassification", num_labels=1),
        squares,
        "number",
        {},
        False,
    ),
    "questions": (lambda: bert("BertForQuestionAnswering"), positions, "positions", {}, True),
    "without keywords": (WithoutLossKeywords, same_tokens, "labels", {}, False),
    "loss function, mean": (
        lambda: bert(MASKED),
        same_tokens,
        "labels",
        {"compute_loss_func": mean_of_microbatch},
        False,
    ),
    "loss function, sum": (
        lambda: bert(MASKED),
        same_tokens,
        "labels",
        {"compute_loss_func": sum_over_items},
        True,
    ),
}


def errors_of(trainer: type[Any], name: str, path: Path) -> list[float]:
    """Train an epoch; return the error of each step's gradient and loss, against float64."""
    build, loss, targets, keywords, _ = CASES[name]
    # 10 samples: on 2 ranks 3 microbatches in 2 steps, the second with one microbatch.
    made = recording(trainer)(
        model=build(),
        args=arguments(path, learning_rate=0.0, num_train_epochs=1),
        train_dataset=Sentences(10, targets),
        **keywords,
    )
    made.train()
    errors = []
    logged = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    for (batches, grads), found in zip(made.steps, logged, strict=True):
        wanted, gradient = reference(made.before, batches_of_all_ranks(batches), loss)
        errors.append(max(largest_error(grads, gradient), abs(found - wanted) / wanted))
    return errors


@pytest.mark.slow
@ranks(2)
def test_gradients_agree_with_global_mean(tmp_path: Path) -> None:
    from distmp.integrations.transformers import Trainer

    found = {name: errors_of(Trainer, name, tmp_path) for name in CASES}
    assert max(max(errors) for errors in found.values()) < 1e-6, found
    assert all(len(errors) == 2 for errors in found.values())
    alone = arguments(tmp_path, use_cpu=False)
    assert alone.world_size == 1
    with pytest.raises(ConfigError, match="each of the 2 ranks would train a model alone"):
        Trainer(llama(), alone)
    _check_data_without_length(tmp_path, samples=[10, 6])
    _check_sharded(tmp_path)


@ranks(2)
def test_loss_of_evaluation_is_mean_of_batch_means(tmp_path: Path) -> None:
    """As on a single rank, also if the model ignores the number of labels."""
    from distmp.integrations.transformers import Trainer

    for name, (build, loss, targets, keywords, _) in CASES.items():
        data = Sentences(8, targets)
        made = Trainer(
            model=build(),
            args=arguments(tmp_path, per_device_eval_batch_size=2),
            eval_dataset=data,
            **keywords,
        )
        before = copy.deepcopy(made.model).double()
        batches = [default_collate([data[index], data[index + 1]]) for index in range(0, 8, 2)]
        wanted = [reference(before, [batch], loss)[0] for batch in batches]
        found = made.evaluate()["eval_loss"]
        assert found == pytest.approx(sum(wanted) / len(wanted), rel=1e-6), name


@pytest.mark.nightly
@ranks(2)
def test_transformers_behaves_as_documented(tmp_path: Path) -> None:
    """What docs/transformers.md says of Transformers itself."""
    import transformers

    theirs = {name: max(errors_of(transformers.Trainer, name, tmp_path)) for name in CASES}
    right = {name: error < 1e-6 for name, error in theirs.items()}
    assert right == {name: case[-1] for name, case in CASES.items()}, theirs
    four_times = 3.0  # 2 ranks times 2 microbatches, minus 1
    for name in ("BERT", "regression", "loss function, mean"):
        assert theirs[name] == pytest.approx(four_times, rel=0.1)
    assert 0.01 < theirs["without keywords"] < 1


def _check_data_without_length(path: Path, samples: list[int]) -> None:
    """What does not fill a step on every rank is left out of this epoch, and of the next one.

    Args:
        path: Directory of the trainer.
        samples: Number of samples of each rank; a microbatch has 2, and a step 2 microbatches.
    """
    import transformers

    from distmp.integrations.transformers import Trainer

    class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            of_rank = samples[dist.get_rank()]
            return (Sentences(20)[10 * dist.get_rank() + index] for index in range(of_rank))

    def errors(trainer: type[Any]) -> list[float]:
        class Streaming(trainer):  # type: ignore[misc]
            def get_train_dataloader(self) -> Any:  # each rank reads its own data
                return torch.utils.data.DataLoader(Stream(), self.args.per_device_train_batch_size)

        changes = {"max_steps": 5, "learning_rate": 0.0}
        made = recording(Streaming)(
            model=llama(), args=arguments(path, **changes), train_dataset=Stream()
        )
        made.train()
        logged = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
        found = []
        for (batches, grads), loss in zip([s for s in made.steps if s[1]], logged, strict=True):
            wanted, gradient = reference(made.before, batches_of_all_ranks(batches), next_tokens)
            found.append(max(largest_error(grads, gradient), abs(loss - wanted) / wanted))
        return found

    with mock.patch.object(logging.getLogger("distmp"), "warning") as warning:
        ours = errors(Trainer)
    assert len(ours) == 5
    assert max(ours) < 1e-6
    if len(samples) == 1:  # Transformers begins an epoch with the gradients that are left
        theirs = [error > 0.9 for error in errors(transformers.Trainer)]
        assert theirs == [False, False, True, False, True]
    messages = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    per_epoch = min(samples) // 4
    assert len(messages) == (0 if dist.get_rank() else (5 - 1) // per_epoch)
    left_out = 3 if len(samples) == 2 else 1  # rank 0 has two, the rank that ends has one
    for text in messages:
        assert f"all ranks end the epoch without its {left_out} microbatches" in text


def _check_sharded(path: Path) -> None:
    """FSDP2 of accelerate, which shards on GPUs only; the code is the same."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    from distmp.integrations.transformers import Trainer

    def made(policy: str, version: int = 2) -> Any:
        wrapped = {
            "version": version,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "sync_module_states": False,  # FSDP1 asks for a GPU
        }
        return recording(Trainer)(
            model=llama(),
            args=arguments(path, fsdp=True, fsdp_config=wrapped, max_steps=1),
            train_dataset=Sentences(8),
            policy=policy,
            loss_scale=RULES,
        )

    with pytest.raises(ConfigError, match="accelerate shards only on several GPUs"):
        made("fp32")
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    with mock.patch.object(torch.accelerator, "is_available", return_value=True):
        for policy, error in (("fp32", 1e-6), ("fp16", 5e-3), ("bf16", 5e-2)):
            trainer = made(policy)
            trainer.train()
            ((batches, shards),) = trainer.steps
            _, gradient = reference(trainer.before, batches_of_all_ranks(batches), next_tokens)
            found = largest_error([shard.full_tensor() for shard in shards], gradient)
            assert found < error, (policy, found)
            assert trainer.state.log_history[0]["skipped_steps"] == 0
        with pytest.raises(ConfigError, match="FSDP1 would sum microbatches in bfloat16"):
            made("bf16", version=1).train()


@pytest.mark.nightly
@pytest.mark.slow
@ranks(2)
def test_all_ranks_skip_and_resume(tmp_path: Path) -> None:
    from distmp.integrations.transformers import Trainer

    class Overflowing(Trainer):
        def compute_loss(self, *positional: Any, **keywords: Any) -> Tensor:
            loss = super().compute_loss(*positional, **keywords)
            overflows = self.state.global_step == 1 and self.accelerator.process_index == 1
            return loss * (torch.inf if overflows else 1.0)

    for policy, scales in (("fp16-autocast", [256, 128, 128, 128]), ("bf16-autocast", None)):
        directory = tmp_path / policy

        made = functools.partial(_made, Overflowing, directory, policy, RULES if scales else None)
        with mock.patch.object(logging.getLogger("distmp"), "warning") as warning:
            straight = made(save_strategy="steps", save_steps=2)
            straight.train()
        messages = [call.args[0] % call.args[1:] for call in warning.call_args_list]
        where = "step 2: the loss of a microbatch of rank 1 is inf"
        assert sum(where in text for text in messages) == (2 if dist.get_rank() == 1 else 0)
        logs = [entry for entry in straight.state.log_history if "loss" in entry]
        assert [entry["skipped_steps"] for entry in logs] == [0, 1, 1, 1]
        assert [entry["learning_rate"] for entry in logs] == pytest.approx(
            [0.1, 0.075, 0.075, 0.05]
        )
        assert [entry.get("loss_scale") for entry in logs] == (scales or [None] * 4)

        resumed = made()
        resumed.train(resume_from_checkpoint=str(directory / "checkpoint-2"))
        weights = [[p.tolist() for p in t.model.parameters()] for t in (straight, resumed)]
        assert weights[0] == weights[1]
        resumed_logs = [entry for entry in resumed.state.log_history if "loss" in entry]
        assert [entry["loss"] for entry in resumed_logs] == [entry["loss"] for entry in logs]
        assert [entry.get("loss_scale") for entry in resumed_logs] == (scales or [None] * 4)
        assert same_on_all_ranks(weights[0])
        # Transformers' own Trainer, which has no scaler under bfloat16, can continue from it.
        assert (directory / "checkpoint-2" / "scaler.pt").exists() == (scales is not None)


@pytest.mark.nightly
@ranks(2)
def test_trainers_are_audited_as_on_the_page(tmp_path: Path) -> None:
    import transformers

    from distmp.integrations.transformers import Trainer

    page = (ROOT / "docs" / "testing.md").read_text()
    (block,) = re.findall(r"```py\n(trainer\..*?)```", page, re.DOTALL)

    def found(trainer: type[Any], model: nn.Module) -> tuple[int, int, str]:
        made = trainer(model, arguments(tmp_path, max_steps=2), train_dataset=Sentences(16))
        names: dict[str, Any] = {"distmp": distmp, "trainer": made}
        exec(block, names)
        report = names["audit"].report
        return report.exit_code, report.steps, str(report)

    for trainer in (transformers.Trainer, Trainer):
        assert found(trainer, llama())[:2] == (0, 2)
    assert found(Trainer, bert(MASKED))[0] != 1  # its pooler may have no gradient
    code, _, text = found(transformers.Trainer, bert(MASKED))
    assert code == 1
    assert "times 4: multiplied by the number of ranks times that of microbatches" in text


@pytest.mark.nightly
@ranks(1)
@pytest.mark.parametrize("theirs", [None, 2.0**10])
def test_checkpoint_of_transformers_continues(theirs: float | None, tmp_path: Path) -> None:
    """The loss scale is that of their scaler, if there is one."""
    import transformers

    from distmp.integrations.transformers import Trainer

    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    straight = transformers.Trainer(
        llama(), arguments(tmp_path, **options), train_dataset=Sentences(16)
    )
    straight.train()
    checkpoint = tmp_path / "checkpoint-2"
    assert not (checkpoint / "scaler.pt").exists()
    if theirs is not None:
        scaler = torch.amp.GradScaler("cpu", init_scale=theirs)
        scaler.scale(torch.ones(()))
        torch.save(scaler.state_dict(), checkpoint / "scaler.pt")
    resumed = _made(Trainer, tmp_path, "fp16-autocast", RULES)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    logs = [
        [entry for entry in trainer.state.log_history[2:] if "loss" in entry]
        for trainer in (straight, resumed)
    ]
    assert [entry["loss_scale"] for entry in logs[1]] == [theirs or RULES.init] * 2
    assert logs[1][0]["loss"] == pytest.approx(logs[0][0]["loss"], rel=1e-3)


def _made(
    trainer: type[Any], directory: Path, policy: str, rules: LossScaleConfig | None, **changes: Any
) -> Any:
    schedule = {"lr_scheduler_type": "linear", "max_steps": 4, "max_grad_norm": 1.0}
    return trainer(
        model=llama(),
        args=arguments(directory, **schedule, **changes),
        train_dataset=Sentences(16),
        policy=policy,
        loss_scale=rules,
    )


@ranks(1)
def test_loss_that_is_a_sum_is_reported(tmp_path: Path) -> None:
    from distmp.integrations.transformers import Trainer

    def warnings(loss: Callable[..., Tensor]) -> list[str]:
        made = Trainer(
            llama(),
            arguments(tmp_path, max_steps=2),
            train_dataset=Sentences(16),
            compute_loss_func=loss,
        )
        with mock.patch.object(logging.getLogger("distmp"), "warning") as warning:
            made.train()
        return [call.args[0] for call in warning.call_args_list]

    def total(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return mean_of_microbatch(outputs, labels, reduction="sum")

    def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return mean_of_microbatch(outputs, labels, reduction="none").sum()

    for loss in (mean_of_microbatch, sum_over_items):
        assert warnings(loss) == []
    for loss in (total, summed):
        (message,) = warnings(loss)
        assert "return the mean of the microbatch" in message


@pytest.mark.nightly
@pytest.mark.slow
@ranks(1)
def test_single_rank_agrees_with_transformers_or_refuses(tmp_path: Path) -> None:
    import transformers

    from distmp.integrations.transformers import Trainer

    changes: dict[str, Any] = {
        "max_grad_norm": 1.0,
        "max_steps": 6,
        "label_smoothing_factor": 0.1,
        "learning_rate": 1e-3,
    }
    both = []
    for trainer in (Trainer, transformers.Trainer):
        made = trainer(
            model=llama(attention_dropout=0.1),
            args=arguments(tmp_path, **changes),
            train_dataset=Sentences(24),
        )
        made.train()
        losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
        both.append((losses, [parameter.detach() for parameter in made.model.parameters()]))
    assert both[0][0] == pytest.approx(both[1][0], rel=1e-6)
    assert len(both[0][0]) == 6
    for ours, theirs in zip(both[0][1], both[1][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)

    class OwnStep(Trainer):
        def training_step(
            self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
        ) -> Any:
            self.accelerator.backward(model(**inputs).loss)

    class OwnBatches(Trainer):
        def get_batch_samples(self, batches: Any, number: int, device: Any) -> Any:
            return [next(batches) for _ in range(number)], None

    for trainer, message in ((OwnStep, "outside of the trainer's"), (OwnBatches, "did not return")):
        made = trainer(llama(), arguments(tmp_path, max_steps=1), train_dataset=Sentences(4))
        with pytest.raises(TrainingError, match=message):
            made.train()

    _check_labels(tmp_path)
    _check_data_without_length(tmp_path, samples=[10])
    _check_refusals(tmp_path)


def _check_refusals(path: Path) -> None:
    import accelerate
    import transformers

    from distmp.integrations.transformers import Trainer, TrainerMixin

    def refused(message: str, keywords: dict[str, Any] | None = None, **changes: Any) -> None:
        with pytest.raises(ConfigError, match=re.escape(message)):
            Trainer(model, arguments(path, **changes), **(keywords or {}))

    model = llama()
    refused("policy = 'fp32' is given as well; pass bf16=False", {"policy": "fp32"}, bf16=True)
    refused("FP32 master weights, which accelerate supports only with FSDP", {"policy": "bf16"})
    refused("would count as equal; remove it", average_tokens_across_devices=False)
    refused("updates weights during backward", optim="galore_adamw_layerwise")
    with mock.patch("transformers.TrainingArguments.n_gpu", 2):
        refused("a single process would use nn.DataParallel")
    with mock.patch.object(type(model), "is_distributed_loading_by_transformers", True):
        refused("Transformers shards and reduces in its own dtypes")

    reused = arguments(path)
    Trainer(llama(), reused)
    with pytest.raises(ConfigError, match="train before you create the next Training"):
        Trainer(llama(), reused, policy="bf16-autocast")

    class OwnAccelerator(transformers.Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            self.accelerator = accelerate.Accelerator(cpu=True)

    class Mixed(TrainerMixin, OwnAccelerator):
        pass

    with pytest.raises(ConfigError, match="Mixed creates its accelerator in another way"):
        Mixed(llama(), arguments(path))
    with pytest.raises(ConfigError, match="name TrainerMixin first"):

        class Late(transformers.Trainer, TrainerMixin):
            pass


def _check_labels(path: Path) -> None:
    """A step without any label is reported, and has a gradient of zero."""
    from distmp.integrations.transformers import Trainer

    sample = Sentences(1)[0]
    unlabelled = [sample | {"labels": torch.full_like(sample["labels"], -100)}] * 4
    made = Trainer(llama(), arguments(path, max_steps=1), train_dataset=unlabelled)
    with mock.patch.object(logging.getLogger("distmp"), "warning") as warning:
        made.train()
    (call,) = warning.call_args_list
    assert "step 1: the loss ignores all labels of all ranks" in call.args[0] % call.args[1:]
    assert made.state.log_history[0]["loss"] == made.state.log_history[0]["grad_norm"] == 0


@pytest.mark.nightly
def test_labels_of_a_causal_model_without_known_loss_are_counted_shifted(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

    from distmp.integrations.transformers import Trainer, _uses_default_loss

    sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout))
    rows = torch.randint(64, (4, 5))
    logits = model.double()(input_ids=rows).logits[:, :-1].flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, rows[:, 1:].flatten()).item()
    made = Trainer(
        model=model.float(),
        args=arguments(tmp_path, max_steps=1, per_device_train_batch_size=2),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )
    made.train()
    assert made.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-6)
    others = llama(), bert("BertForMaskedLM"), GPT2Model(GPT2Config(**sizes))
    assert not any(map(_uses_default_loss, others))


@ranks(1)
def test_numbers_equal_to_the_ignored_label_count(tmp_path: Path) -> None:
    from distmp.integrations.transformers import Trainer

    targets = [-100.0, -100.0, -100.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    made = recording(Trainer)(
        model=bert("BertForSequenceClassification", num_labels=1, problem_type="regression"),
        args=arguments(tmp_path, max_steps=1, per_device_train_batch_size=4, learning_rate=0.0),
        train_dataset=[{**Sentences(1)[0], "labels": torch.tensor(target)} for target in targets],
    )
    made.train()
    ((batches, gradients),) = made.steps
    wanted, gradient = reference(made.before, batches, squares)
    assert made.state.log_history[0]["loss"] == pytest.approx(wanted, rel=1e-5)
    assert largest_error(gradients, gradient) < 1e-5


def test_padding_of_spectrograms_does_not_count() -> None:
    from distmp.integrations.transformers import _count

    labels = torch.randn(2, 6, 3)
    labels[1, 3:] = -100.0
    assert int(_count({"labels": labels}, shifted=False)[0]) == 6 * 3 + 3 * 3


def test_pixels_without_class_do_not_count(tmp_path: Path) -> None:
    """Segformer ignores the label 255, and with one class takes the mean over all pixels."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    from distmp.integrations.transformers import Trainer, _count, _ignored_pixel

    sizes = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [1, 1], "hidden_sizes": [8, 8]}
    sizes |= {"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 1]}
    no_dropout = {"classifier_dropout_prob": 0.0, "drop_path_rate": 0.0}
    config = SegformerConfig(**sizes, **no_dropout, mlp_ratios=[1, 1], decoder_hidden_size=8)
    assert config.num_labels == 2
    model = SegformerForSemanticSegmentation(config)
    model.decode_head.batch_norm = nn.Identity()  # it would depend on the microbatch
    images, labels = torch.randn(4, 3, 8, 8), torch.randint(2, (4, 8, 8))
    labels[:2] = 0
    labels[:2, 1:] = 255
    nn.init.constant_(model.decode_head.classifier.bias[:1].detach(), 2.0)
    # The mean over all pixels that have a class, from means of samples.
    means = [model(images[i, None], labels=labels[i, None]).loss.item() for i in range(4)]
    counts = labels.ne(255).sum((1, 2)).tolist()
    expected = sum(mean * count for mean, count in zip(means, counts, strict=True)) / sum(counts)
    made = Trainer(
        model=model,
        args=arguments(
            tmp_path, max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=4
        ),
        train_dataset=[
            {"pixel_values": image, "labels": label}
            for image, label in zip(images, labels, strict=True)
        ],
    )
    made.train()
    assert made.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-5)
    batch = {"labels": labels}
    pixel = _ignored_pixel(model)
    assert int(_count(batch, shifted=False, pixel=pixel)[0]) == sum(counts)
    config.num_labels = 1
    pixel = _ignored_pixel(model)
    assert int(_count(batch, shifted=False, pixel=pixel)[0]) == labels.numel()
    assert int(_count({"labels": torch.tensor([3, 255])}, shifted=False, pixel=255)[0]) == 2


@ranks(1)
def test_older_transformers_is_one_message(tmp_path: Path) -> None:
    import transformers

    from distmp.integrations.transformers import Trainer

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delattr(transformers.Trainer, "loss_is_scaled_for_ga")
        with pytest.raises(ConfigError, match=r"^transformers = '5.*run pip install 'distmp\["):
            Trainer(llama(), arguments(tmp_path), train_dataset=Sentences(16))


def test_missing_transformers_message_names_package() -> None:
    code = "import sys; sys.modules['transformers'] = None; import distmp.integrations.transformers"
    done = run(python("-c", code), Path.cwd())
    assert "run pip install 'distmp[trainers]'" in done.stderr


def test_rules_for_short_runs_grow_scale_earlier() -> None:
    assert LossScaleConfig.for_short_runs() == LossScaleConfig(growth_interval=400)
    assert LossScaleConfig.for_short_runs(growth_interval=50, init=4.0).growth_interval == 50


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ({"pairs": {"left": torch.ones(5, 2), "right": torch.ones(5)}}, 5),
        ((torch.ones(3, 2), torch.ones(3)), 3),
        ({"return_loss": True, "pixels": torch.ones(4, 2)}, 4),
        ([{"prompt": "a"}, {"prompt": "b"}], 2),
    ],
)
def test_batch_without_labels_counts_samples(batch: Any, samples: int) -> None:
    from distmp.integrations.transformers import _count

    assert _count(batch, shifted=False) == (samples, False)
    with pytest.raises(TrainingError, match="let data_collator return tensors"):
        _count({"text": "a"}, shifted=False)
