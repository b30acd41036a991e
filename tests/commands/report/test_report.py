from __future__ import annotations

import json
import math
from contextlib import closing
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from distmp.cli import main
from distmp.commands.report.page import RecordedRun, draw
from distmp.telemetry.records import RecordWriter, StepRecord
from tests.telemetry.samples import record

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'"


def write_run(directory: Path, records: list[StepRecord], config: str = "") -> Path:
    directory.mkdir()
    with closing(
        RecordWriter(directory / "steps.jsonl", resume_after_step=None, warn=pytest.fail)
    ) as writer:
        for one in records:
            writer.write(one)
    (directory / "config.yaml").write_text(config)
    return directory


def skipped(step: int, **overflow: Any) -> StepRecord:
    return record(step, skipped=True, skipped_total=1, grad_norm=math.inf, overflow=overflow)


class Page(HTMLParser):
    """Parses a page as a browser does: tags with attributes, and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def cells(self) -> str:
        return "\n".join(self.texts)


def charts(*directories: Path) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Return the drawn points by the titles of charts and the labels of curves."""
    figure = draw([RecordedRun.read(directory) for directory in directories])
    return {
        axes.get_title("left"): {
            line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
            for line in axes.lines
        }
        for axes in figure.axes
    }


def report(*arguments: Path | str) -> Page:
    assert main(["report", *map(str, arguments)]) == 0
    target = Path(arguments[0]) / "report.html"
    if "--to" in arguments:
        target = Path(arguments[arguments.index("--to") + 1])
    return Page(target.read_text())


def test_charts_agree_with_records(tmp_path: Path) -> None:
    records = [record(s, loss=3 - s / 100, weight_per_second=s * 10.0) for s in range(1, 41)]
    records[19] = skipped(20, diagnosis="too high", advice="wait")
    metrics = {"accuracy": 0.5, "ema_accuracy": 0.75}
    records[29] = record(30, validation_loss=2.5, loss=math.nan, validation_metrics=metrics)
    found = charts(write_run(tmp_path / "run", records))

    steps, losses = found["Loss"]["each step"]
    assert steps == list(range(1, 41))
    assert losses == pytest.approx([one.loss for one in records], nan_ok=True)
    assert found["Loss"]["validation"] == ([30], [2.5])
    assert found["Held-out accuracy"] == {"accuracy": ([30], [0.5]), "ema_accuracy": ([30], [0.75])}
    assert set(found["Loss scale"]["each step"][1]) == {65536}
    assert found["Loss scale"]["1 skipped"] == ([20], [65536])
    # The first step compiles; its time would flatten the others.
    steps, rates = found["Throughput, tok/s"]["each step"]
    assert (steps[0], rates[0]) == (2, 20)


def test_page_of_long_run_stays_small(tmp_path: Path) -> None:
    records = [record(s, loss=99.0 if s == 17_001 else 2.0) for s in range(1, 3_001)]
    directory = write_run(tmp_path / "run", records)
    assert report(directory)
    assert (directory / "report.html").stat().st_size < 500_000


def test_page_is_self_contained(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", [record(1)])
    page = report(directory)
    text = (directory / "report.html").read_text()
    for tag, attributes in page.tags:
        assert not {"href", "srcset"} & attributes.keys(), tag
        assert str(attributes.get("src", "data:image/png;base64,")).startswith("data:image/png")
    assert "http" not in text
    assert "@import" not in text
    assert "url(" not in text


@pytest.mark.nightly
def test_text_of_run_is_escaped(tmp_path: Path) -> None:
    records = [record(1), skipped(2, diagnosis=EVIL, advice=EVIL)]
    config = f"steps: 2\nmodel:\n  name: {json.dumps(EVIL)}\n"
    first = write_run(tmp_path / "a & <b>", records, config)
    other = write_run(tmp_path / "other", [record(1)], "steps: 2\n")
    for page in (report(first), report(first, other)):
        tags = [tag for tag, _ in page.tags]
        assert (tags.count("script"), tags.count("img")) == (0, 1)
        assert page.texts.count(EVIL) >= 3  # diagnosis, advice, setting
    # The labels of charts of two runs contain their names.
    assert [*charts(first, other)["Loss"]] == ["a & <b>, each step", "other, each step"]


def test_summary_agrees_with_records(tmp_path: Path) -> None:
    records = [record(s, loss=float(s), step_seconds=2.0) for s in range(1, 101)]
    records[9] = record(10, validation_loss=1.25, memory_bytes=3 * 2**30)
    page = report(write_run(tmp_path / "run", records, "steps: 400\n"))
    summary = page.texts[: page.texts.index("Configuration")]
    shown = dict(pairwise(summary))
    assert shown["steps"] == "100 of 400"
    assert shown["loss, last 50 steps"] == "75.5000"
    assert shown["best validation loss"] == "1.2500"
    assert shown["time in steps"] == "3:18"
    assert shown["peak memory of a rank"] == "3.0 GiB"


def test_reason_of_each_skipped_step_is_shown(tmp_path: Path) -> None:
    spike = {"problem": "loss 9 is 5 times the usual one", "action": "skip"}
    records = [
        skipped(1, diagnosis="the loss scale was too high"),
        record(2, skipped=True, skipped_total=2, divergence=spike),
        record(3, skipped=True, skipped_total=3),
    ]
    shown = [row[2] for row in RecordedRun.read(write_run(tmp_path / "run", records)).skipped()]
    expected = ["the loss scale was too high", spike["problem"], "no gradients to apply"]
    assert shown == expected


def test_two_runs_show_their_different_settings(tmp_path: Path) -> None:
    first = write_run(tmp_path / "one", [record(1)], "steps: 2\noptim:\n  lr: 0.1\n  name: sgd\n")
    other = write_run(tmp_path / "two", [record(1)], "steps: 2\noptim:\n  lr: 0.2\n  name: sgd\n")
    target = tmp_path / "both.html"
    page = report(first, other, "--to", str(target))
    start = page.texts.index("Configuration")
    different = page.texts[start : page.texts.index("all 3 settings")]
    assert [text for text in different if text.strip()] == (
        ["Configuration", "one", "two", "optim.lr", "0.1", "0.2"]
    )


@pytest.mark.parametrize("content", [None, b""])
def test_directory_without_steps_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "steps.jsonl").write_bytes(content)
    assert main(["report", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert str(tmp_path) in message
    assert "contains no step" in message
    assert message.count("\n") == 1


def test_too_long_path_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", 300 * "9"]) == 2
    assert "contains no step" in capsys.readouterr().err


def test_home_directory_is_found_after_equals_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["report", str(write_run(tmp_path / "run", [record(1)])), "--to=~/run.html"]) == 0
    assert (tmp_path / "run.html").is_file()


def test_unwritable_path_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_run(tmp_path / "run", [record(1)])
    assert main(["report", str(directory), "--to", str(tmp_path / "nowhere" / "x.html")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_environment_of_last_start_is_shown(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", [record(1)])
    starts = [{"versions": {"torch": "1"}}, {"versions": {"torch": "2"}, "configuration": {"a": 1}}]
    (directory / "manifest.json").write_text(json.dumps({"starts": starts}))
    page = report(directory)
    environment = page.texts[page.texts.index("Environment") :]
    assert environment[1:4] == ["1 values", "versions.torch", "2"]
