"""The examples of the page on data train."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.figures import ROOT
from distmp import cli
from distmp.telemetry.records import read_records
from distmp.train import main
from tests.marks import nightly
from tests.torchrun import SENTENCES

PAGE = (ROOT / "docs" / "own-data.md").read_text()
TINY = [
    *("--batch.global-batch-size=4", "--batch.microbatch-size=2", "--strategy=single"),
    *("--data.sequence-length=16", "--precision.policy=fp32", "--steps=2"),
]
TRANSFORMER = ["--model.options={layers: 1, dimension: 16, heads: 2, hidden: 16}"]
UNITS = {
    "Text files": ("token", "nats per byte"),
    "Tokenize text": ("token", "nats per token"),
    "A token file": ("token", "nats per token"),
    "Columns of a Hugging Face dataset": ("token", "nats per token"),
    "Your own dataset": ("sample", ""),
    "Iterable datasets": ("token", "nats per token"),
}


def section(heading: str) -> list[tuple[str, str]]:
    """Return language and content of the code blocks below a heading."""
    text = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```(\w+)\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the data that the examples read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    directory = tmp_path / "data"
    (directory / "text").mkdir(parents=True)
    for number in range(6):
        (directory / "text" / f"{number}.txt").write_text(SENTENCES[number % 2] * 20)
    stories = [json.dumps({"text": sentence * 20}) for sentence in SENTENCES]
    (directory / "stories.jsonl").write_text("\n".join(stories))
    (directory / "reviews").mkdir()
    generator = torch.Generator().manual_seed(0)
    for split in ("train", "validation"):
        words = [torch.randint(1, 100, (length,), generator=generator) for length in range(3, 12)]
        rows = [{"words": row, "stars": int(row[0]) % 5} for row in words]
        torch.save(rows, directory / "reviews" / f"{split}.pt")
        lines = [" ".join(str(i % 300) for i in range(n, n + 17)) for n in range(12)]
        (directory / f"{split}.ids").write_text("\n".join(lines))
    yield directory
    for name in ("columns", "my_data", "my_model", "my_stream"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "heading", [name if name == "Tokenize text" else nightly(name) for name in UNITS]
)
def test_example_of_own_data_trains(
    heading: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if heading.startswith("Columns"):
        datasets = pytest.importorskip("datasets")
        columns = {"input_ids": [[*range(16)]] * 8, "attention_mask": [[1] * 16] * 8}
        rows = datasets.Dataset.from_dict(columns)
        datasets.DatasetDict({"train": rows}).save_to_disk(data / "columns")
    for language, block in section(heading):
        if language == "console":
            assert cli.main(block.split()[1:]) == 0
        elif language == "py":
            name = re.match(r"# (\w+\.py)\n", block)
            if name:
                Path(name[1]).write_text(block)
            else:
                exec(block, {})
        else:
            Path("config.yaml").write_text(block)
    own_model = "my_model" in Path("config.yaml").read_text()
    arguments = ["--config=config.yaml", *TINY, *([] if own_model else TRANSFORMER)]
    if not heading.startswith("Columns"):  # it has no validation
        arguments.append("--validation.final-samples=3")
    assert main([*arguments, "--run-dir=run"]) == 0
    unit, of_loss = UNITS[heading]
    records = read_records("run/steps.jsonl")
    assert [record.unit for record in records] == [unit, unit]
    output = capsys.readouterr().out
    assert ("samples/s" in output) == (unit == "sample")
    if heading.startswith("Columns"):
        assert "held-out" not in output
    else:
        assert re.search(rf"held-out loss [\d.]+ ?{of_loss}\n", output), output
