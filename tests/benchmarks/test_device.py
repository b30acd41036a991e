from __future__ import annotations

import time

import pytest
import torch

from benchmarks.device import CPU, elapsed, parse, parser

SIZES = {"cpu": "small", "cuda": "large"}


def given(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, object]:
    monkeypatch.setattr("sys.argv", ["benchmark", *arguments])
    options = parser("A benchmark.", rounds=7, ranks=True)
    options.add_argument("--size")
    return vars(parse(options, size=SIZES))


def test_defaults_depend_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert given(monkeypatch) == {"device": CPU, "rounds": 7, "ranks": 2, "size": "small"}
    found = given(monkeypatch, "--ranks", "3", "--size", "1m", "--rounds", "1")
    assert found == {"device": CPU, "rounds": 1, "ranks": 3, "size": "1m"}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    found = given(monkeypatch, "--device", "cuda")
    cuda = torch.device("cuda", 0)
    assert found == {"device": cuda, "rounds": 7, "ranks": 4, "size": "large"}


@pytest.mark.parametrize(
    ("device", "message"),
    [("cuda", "torch sees no CUDA device"), ("tpu", "'tpu' is neither cpu nor cuda")],
)
def test_a_missing_device_is_refused(
    device: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        given(monkeypatch, "--device", device)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_time_is_that_of_the_work() -> None:
    assert elapsed(lambda: time.sleep(0.05), CPU) >= 0.05


@pytest.mark.gpu
@pytest.mark.real_gpu
def test_time_on_a_gpu_is_that_of_the_device() -> None:
    device = torch.device("cuda", 0)
    matrix = torch.ones(4096, 4096, device=device)

    def products() -> None:
        for _ in range(20):
            matrix @ matrix

    products()
    started = time.perf_counter()
    found = elapsed(products, device)
    # The host finishes long before the device, but waits for it.
    assert 1e-4 < found <= time.perf_counter() - started
