"""Samples of generated text: during training, with a tokenizer, and for sharded models."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distmp import cli
from distmp.config import load
from distmp.errors import ConfigError, SetupError
from distmp.training.callbacks.sample import generate
from distmp.training.trainer import Trainer
from tests.commands.test_tokenize import save_tokenizer
from tests.ranks import run_ranks
from tests.reference import assert_same_bits, snapshot
from tests.torchrun import TINY, corpus
from tests.toys import printed, trainer_of


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a tokenizer, and tokens of it and of bytes."""
    directory = tmp_path_factory.mktemp("tokens")
    text = corpus(directory / "text")
    for name, words in (("tokenizer", "the quick brown fox"), ("other", "jumps over the lazy dog")):
        save_tokenizer(directory / name, words)
    for target, tokenizer in (("ids", str(directory / "tokenizer")), ("bytes", "bytes")):
        arguments = ["--to", str(directory / target), "--tokenizer", tokenizer, "--workers", "1"]
        assert cli.main(["data", "tokenize", str(text), *arguments]) == 0
    return directory


def trainer(directory: Path, run_dir: str, *arguments: str) -> Trainer:
    config = load(
        [
            *TINY,
            "--data.source=tokens",
            f"--run-dir={directory / run_dir}",
            "--steps=5",
            "--schedule.warmup-steps=1",
            "--sample.prompt=the quick",
            *arguments,
        ]
    )
    return trainer_of(config)


def samples(directory: Path, run_dir: str, *arguments: str) -> tuple[list[str], dict[str, Any]]:
    """Train, and return the samples and the state at the end."""
    run = trainer(directory, run_dir, *arguments)
    return printed(run, "sample of", "no sample of"), snapshot(run.engine)


@pytest.mark.nightly
def test_sampling_changes_no_bit_under_strategies(tokens: Path) -> None:
    options = (f"--data.path={tokens / 'ids'}", f"--sample.tokenizer={tokens / 'tokenizer'}")
    for strategy in ("ddp", "fsdp"):
        chosen = (*options, f"--strategy={strategy}")
        with_samples = run_ranks(samples, 2, tokens, f"{strategy}-a", *chosen, "--sample.every=2")
        without = run_ranks(samples, 2, tokens, f"{strategy}-b", *chosen, "--sample.length=0")
        for (lines, state), (none, expected) in zip(with_samples, without, strict=True):
            assert_same_bits(state, expected)
            assert none == []
            first_lines = [line.partition("\n") for line in lines]
            assert [first for first, _, _ in first_lines] == [
                "sample of generated text after step 2:",
                "sample of generated text after step 4:",
                "sample of generated text:",
            ]
            assert all(text.startswith("the quick") for _, _, text in first_lines)
            assert all(len(text) > len("the quick") for _, _, text in first_lines)


def test_byte_tokens_need_no_tokenizer(tokens: Path) -> None:
    options = [f"--data.path={tokens / 'bytes'}", "--sample.length=4"]
    (lines,) = (found[0] for found in run_ranks(samples, 1, tokens, "bytes-run", *options))
    assert len(lines) == 1
    assert lines[0].startswith("sample of generated text:\nthe quick")


def refusal(directory: Path) -> str:
    """Return the message about a tokenizer that does not exist."""
    options = (f"--data.path={directory / 'ids'}", f"--sample.tokenizer={directory / 'nowhere'}")
    with pytest.raises((ConfigError, SetupError)) as caught:
        trainer(directory, "refused", *options)
    return str(caught.value)


def test_missing_tokenizer_is_refused(tokens: Path) -> None:
    (found,) = run_ranks(refusal, 1, tokens)
    assert "sample.tokenizer = " in found
    assert "transformers cannot load it" in found


def test_modules_in_evaluation_mode_stay_in_it() -> None:
    """Such as frozen batch norms, which a sample during training must not unfreeze."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Dropout(0.5), nn.Linear(4, 5))
    model[1].eval()
    generate(model, torch.tensor([1]), count=2, sequence_length=4)
    assert [part.training for part in model.modules()] == [True, True, False, True]


class Counter(nn.Module):
    """Predicts the next of ten tokens after each token; records its inputs."""

    def __init__(self, certainty: float = 50.0) -> None:
        super().__init__()
        self.certainty = certainty
        self.seen: list[list[int]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        self.seen.append(tokens[0].tolist())
        return self.certainty * nn.functional.one_hot((tokens + 1) % 10, 10).float()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sample_continues_the_prompt(temperature: float) -> None:
    model = Counter().train()
    tokens = generate(
        model, torch.tensor([3, 7]), count=5, sequence_length=4, temperature=temperature
    )
    assert tokens.tolist() == [3, 7, 8, 9, 0, 1, 2]
    assert tokens.dtype == torch.int64
    assert model.seen == [[3, 7], [3, 7, 8], [3, 7, 8, 9], [7, 8, 9, 0], [8, 9, 0, 1]]
    assert model.training


def test_sampling_follows_tempered_probabilities() -> None:
    # One logit of 2 among zeros: at temperature 2 its token has e / (e + 9) = 0.232.
    generator = torch.Generator().manual_seed(0)
    tokens = generate(
        Counter(2.0),
        torch.tensor([0]),
        count=4000,
        sequence_length=1,
        temperature=2.0,
        generator=generator,
    ).tolist()
    share = sum(b == (a + 1) % 10 for a, b in itertools.pairwise(tokens)) / 4000
    assert abs(share - 0.232) < 4 * (0.232 * 0.768 / 4000) ** 0.5


def test_equal_generators_give_equal_text() -> None:
    drawn = [
        generate(
            Counter(0.1),
            torch.tensor([0]),
            count=20,
            sequence_length=8,
            generator=torch.Generator().manual_seed(seed),
        ).tolist()
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_training_mode_is_restored_after_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2)).train()
    with pytest.raises(RuntimeError):
        generate(model, torch.tensor([0]), count=1, sequence_length=8)
    assert model.training
