from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import peak, report
from benchmarks.gpus import Gpu
from benchmarks.peak import count, datasheet, kind_of, model_flops, share, transformer_flops
from distmp.models.settings import SIZES
from distmp.precision import policy


@pytest.mark.parametrize(
    ("name", "bfloat16", "float32"),
    [
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA GH200 480GB", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA A100 80GB PCIe", 312e12, 19.5e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA L4", 121e12, 30.3e12),
    ],
)
def test_the_peak_comes_from_the_datasheet(name: str, bfloat16: float, float32: float) -> None:
    found = datasheet(name)
    assert found is not None
    assert found["bfloat16"] == found["float16"] == bfloat16
    assert found["float32"] == float32
    assert float32 < found["tf32"] < bfloat16


@pytest.mark.parametrize(
    "name", ["NVIDIA H200 NVL", "NVIDIA H100 NVL", "NVIDIA RTX A1000", "NVIDIA L40", "Tesla T4"]
)
def test_the_peak_of_another_gpu_is_unknown(name: str) -> None:
    assert datasheet(name) is None


def test_the_kind_of_product_of_a_policy() -> None:
    kinds = {name: kind_of(policy(name)) for name in ("fp32", "tf32", "bf16", "fp16-autocast")}
    assert kinds == {
        "fp32": "float32",
        "tf32": "tf32",
        "bf16": "bfloat16",
        "fp16-autocast": "float16",
    }
    assert set(kinds.values()) == (datasheet("NVIDIA H200") or {}).keys()


def test_the_share_is_work_per_second_of_the_peak() -> None:
    found = {"flops": {"bfloat16": 1000e12, "float32": 50e12}}
    assert share(20e12, 0.05, found, "bfloat16") == pytest.approx(0.4)
    assert share(20e12, 0.5, found, "float32") == pytest.approx(0.8)


@pytest.mark.parametrize(("name", "known"), [("NVIDIA H200", True), ("a new GPU", False)])
def test_unknown_peaks_are_measured(
    name: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peak, "_PRODUCT_SIZE", 16)
    monkeypatch.setattr(peak, "_COPY_BYTES", 1000)
    monkeypatch.setattr(peak, "elapsed", lambda work, device: work() is None or 1e-3)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
    found = peak.peak(torch.device("cpu"))
    assert found["product"] == dict.fromkeys(peak._POLICIES, 2 * 16**3 / 1e-3)
    assert found["bandwidth"] == 2 * 1000 / 1e-3
    assert found["flops"] == (datasheet(name) if known else found["product"])
    assert found["source"].startswith("NVIDIA's datasheet" if known else "products of 16^3")


def test_a_result_names_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Gpu("NVIDIA H200", "580.1")
    monkeypatch.setattr(report, "gpus", lambda: (driver,))
    monkeypatch.setattr(report, "peak", lambda device: {"bandwidth": 4e12})
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=150e9)
    )
    found = json.loads(json.dumps(report.machine("cuda")))
    assert (found["gpu"], found["capability"], found["driver"]) == ("NVIDIA H200", "9.0", "580.1")
    assert found["peak"] == {"bandwidth": 4e12}
    assert {"cuda", "torch", "date", "gpu_memory"} <= found.keys()
    assert report.machine("cpu")["gpu"] is None


@pytest.mark.gpu
@pytest.mark.real_gpu
def test_a_gpu_reaches_a_part_of_its_peak() -> None:
    found = report.machine("cuda")["peak"]
    for kind, reached in found["product"].items():
        assert 0.3 < reached / found["flops"][kind] < 1.1, kind
    assert found["bandwidth"] > 1e11


def test_work_is_counted_in_multiplications_and_additions() -> None:
    left, right = torch.ones(3, 5), torch.ones(5, 7)
    assert count(lambda: left @ right + 1) == 2 * 3 * 5 * 7


def test_backward_costs_two_products_where_the_input_needs_a_gradient() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8)).to("meta")
    batch = torch.ones(4, 16, device="meta")
    found = model_flops(model, lambda model, batch: (model(batch).sum(), 4), batch)
    # Forward and the weights' gradients of both layers; the input's gradient of the second.
    assert found == 2 * 4 * (2 * (16 * 32 + 32 * 8) + 32 * 8)


@pytest.mark.parametrize("samples", [1, 2])
def test_the_work_of_the_transformer(samples: int) -> None:
    size = SIZES["1m"]
    layers, dimension, hidden = size["layers"], size["dimension"], size["hidden"]
    length, vocabulary = 64, 100
    products = layers * (4 * dimension**2 + 3 * dimension * hidden) + dimension * vocabulary
    # Scores and their use, for every pair of positions whether masked or not.
    attention = layers * 2 * length * dimension
    tokens = samples * length
    # Backward costs twice the forward.
    assert transformer_flops("1m", samples, length, vocabulary) == 6 * tokens * (
        products + attention
    )
