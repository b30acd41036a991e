"""Batches of Hugging Face against the loss of transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distmp.data import IGNORED
from distmp.data.dataloader import DataLoader
from distmp.errors import ConfigError
from distmp.models.huggingface import prepare_loss
from distmp.models.loss import model_options, next_token_loss
from distmp.models.transformer import Transformer, TransformerConfig
from tests.reference import make_engine, plain_sgd

VOCABULARY = 40


def transformers_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def padded(left: bool = False) -> dict[str, Tensor]:
    """Three rows of 12, 7 and 1 tokens; the second has a prompt without a loss."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (3, 12), generator=generator)
    mask = (torch.arange(12) < torch.tensor([[12], [7], [1]])).long()
    if left:
        mask = mask.flip(1)
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[1, 3:5] = IGNORED
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def without(batch: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name not in names}


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunked", [False, True])
def test_loss_and_gradients_agree_with_transformers(
    left: bool, dtype: torch.dtype, chunked: bool
) -> None:
    reference, model = transformers_model().to(dtype), transformers_model().to(dtype)
    if chunked:
        assert prepare_loss(model)
    batch = padded(left)
    expected = reference(**batch).loss
    expected.backward()
    loss, weight = next_token_loss(model, batch)
    assert weight.item() == (batch["labels"][:, 1:] != IGNORED).sum()
    assert (loss / weight).item() == pytest.approx(expected.item(), rel=1e-6)
    (loss / weight).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_labels_follow_only_the_mask() -> None:
    model, batch = transformers_model(), padded()
    everything = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    expected = model(**{**batch, "labels": everything}).loss.item()
    loss, weight = next_token_loss(model, without(batch, "labels"))
    assert (loss / weight).item() == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ConfigError, match=r"batch = \['input_ids'\]: has no 'labels'; add them"):
        next_token_loss(model, without(batch, "labels", "attention_mask"))


def own_model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(TransformerConfig(VOCABULARY, 16, 2, 16, 2, 32))


def test_padding_does_not_change_loss_of_other_models() -> None:
    model, batch = own_model(), padded()
    total = torch.zeros(2)
    for row in range(3):
        length = int(batch["attention_mask"][row].sum())
        ids, labels = batch["input_ids"][row, :length], batch["labels"][row, :length]
        inputs = {"inputs": ids[None, :-1], "targets": labels[None, 1:]}
        if length > 1:
            total += torch.stack(next_token_loss(model, inputs)).detach()
    loss, weight = next_token_loss(model, batch)
    assert weight == total[1] == 11 + 6 - 2
    assert loss.item() == pytest.approx(total[0].item(), rel=1e-5)


class Plain(nn.Module):
    """A user's model, which takes tokens only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def test_mask_and_positions_of_shifted_batch_reach_model() -> None:
    model, batch = transformers_model(), padded(left=True)
    batch["position_ids"] = 2 * (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    ids, labels = batch.pop("input_ids"), batch.pop("labels")
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    loss, weight = next_token_loss(model, {"inputs": ids, "targets": shifted, **batch})
    expected = model(input_ids=ids, labels=labels, **batch).loss
    assert (loss / weight).item() == pytest.approx(expected.item(), rel=1e-6)


def test_packed_documents_do_not_attend_to_each_other() -> None:
    model = transformers_model()
    ids = torch.randint(VOCABULARY, (1, 12))
    documents = ids[:, :5], ids[:, 5:]
    expected = sum(
        model(input_ids=part, labels=part).loss * (part.shape[1] - 1) for part in documents
    )
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    labels = ids.clone()
    labels[:, 5] = IGNORED
    loss, weight = next_token_loss(
        model, {"input_ids": ids, "labels": labels, "position_ids": positions}
    )
    assert weight == 4 + 6
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_mask_that_hides_the_documents_is_refused() -> None:
    model, ids = transformers_model(), torch.randint(VOCABULARY, (2, 6))
    mask = torch.ones_like(ids)
    mask[0, 0] = mask[1, 5] = 0
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    # Positions restart next to padding only, and those of an image are equal.
    padded_rows = torch.tensor([[1, 0, 1, 1, 1, 2], [0, 1, 2, 3, 4, 0]])
    next_token_loss(model, {**batch, "position_ids": padded_rows})
    packed = torch.tensor([[1, 0, 1, 2, 3, 4], [0, 1, 2, 0, 1, 0]])
    with pytest.raises(
        ConfigError, match=r"position_ids = \[0, 1, 2, 0, 1, 0\]: restarts, .* return labels in"
    ):
        next_token_loss(model, {**batch, "position_ids": packed})
    model.config._attn_implementation = "flash_attention_2"  # finds the documents
    model_options({**batch, "position_ids": packed}, model)


def test_scripted_model_has_the_loss_of_its_original() -> None:
    model, ids = Plain(), torch.randint(VOCABULARY, (2, 12))
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    scripted = torch.jit.trace(model, batch["inputs"])
    assert torch.equal(next_token_loss(scripted, batch)[0], next_token_loss(model, batch)[0])


class Swallows(Plain):
    def forward(self, tokens: Tensor, **_: object) -> Tensor:
        return super().forward(tokens)


def test_any_keywords_do_not_take_positions() -> None:
    with pytest.raises(ConfigError, match="'position_ids', which the model's forward does not"):
        next_token_loss(Swallows(), {**padded(), "position_ids": torch.zeros(3, 12)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (padded(left=True), r"attention_mask = \[0, 0, 0, 0, 0, 1.*padding_side='right'"),
        ({"inputs": torch.zeros(3, 12)}, "has 'inputs' and 'input_ids'; return either"),
        ({"position_ids": torch.zeros(3, 12)}, "'position_ids'.: has 'position_ids', which the"),
        ({"labels": torch.zeros(3, 11)}, r"'labels': \(3, 11\)}: input_ids and labels must be"),
    ],
)
def test_misleading_batches_are_refused(changes: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        next_token_loss(Plain(), {**padded(), **changes})


def test_dataset_training_and_evaluation_agree_with_transformers() -> None:
    from datasets import Dataset

    columns = {name: value.tolist() for name, value in padded().items()}
    loader = DataLoader(Dataset.from_dict(columns), 3, 3, shuffle=False)
    model, reference = transformers_model(), transformers_model()
    engine = make_engine(model=model, loss=next_token_loss, optimizer=plain_sgd)
    expected = reference(**padded()).loss
    assert engine.evaluate(loader.once()) == pytest.approx(expected.item(), rel=1e-6)
    expected.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in reference.parameters()))
    for microbatches in loader:
        numbers = engine.step(microbatches).numbers
    assert numbers.loss == pytest.approx(expected.item(), rel=1e-6)
    assert numbers.grad_norm == pytest.approx(norm, rel=1e-4)


def test_transformers_collators_pad_batches_for_loss() -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import (
        DataCollatorForLanguageModeling,
        DataCollatorForSeq2Seq,
        PreTrainedTokenizerFast,
    )

    words = Tokenizer(WordLevel({str(n): n for n in range(VOCABULARY)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0")
    rows = [[*range(3, 3 + length)] for length in (9, 4, 6, 2)]
    model = transformers_model()
    total = sum(
        model(input_ids=ids, labels=ids).loss.item() * (ids.numel() - 1)
        for ids in (torch.tensor([row]) for row in rows)
    )
    for collate, columns in (
        (DataCollatorForSeq2Seq(tokenizer), {"labels": rows}),
        (DataCollatorForLanguageModeling(tokenizer, mlm=False), {}),
    ):
        dataset = Dataset.from_dict({"input_ids": rows, **columns})
        loader = DataLoader(dataset, 4, 2, collate_fn=collate)
        parts = [next_token_loss(model, batch) for step in loader for batch in step]
        assert sum(weight.item() for _, weight in parts) == 8 + 3 + 5 + 1
        assert sum(loss.item() for loss, _ in parts) == pytest.approx(total, rel=1e-5)
