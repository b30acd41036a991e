from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import load_model as load_with_safetensors
from torch import Tensor, nn

from benchmarks.memory import EXACT_MALLOC
from distmp import cli
from distmp.checkpoint import saving
from distmp.errors import CheckpointError, ConfigError
from distmp.export.export import CheckpointWeights, export
from distmp.export.files import write
from distmp.export.weights import load_model, load_weights
from distmp.models.architecture import described
from distmp.models.transformer import Transformer
from distmp.telemetry.records import read_records
from distmp.train import main
from tests.ranks import run_ranks
from tests.reference import (
    TWO_RANKS,
    Classifier,
    assert_same_bits,
    fused_sgd,
    make_engine,
    make_model,
    train,
    weights,
)
from tests.torchrun import SIZES, TINY, corpus, python, run

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp, fp32": {"strategy": "ddp"},
    "ddp, bf16": {"strategy": "ddp", "policy": "bf16"},
    "sharded ddp, bf16": {"strategy": "ddp", "policy": "bf16", "shard_optimizer": True},
    "fsdp, fp16": {"strategy": "fsdp", "policy": "fp16"},
}


def save_each(directory: Path) -> dict[str, dict[str, Tensor]]:
    """Train by each strategy, save, and return the FP32 weights."""
    found = {}
    for name, options in STRATEGIES.items():
        engine = make_engine(**options)
        train(engine, 2, TWO_RANKS)
        saving.save(directory / name / "checkpoints", 2, engine.state_dict(), {"step": 2}, keep=1)
        found[name] = weights(engine)
    return found


def test_master_weights_of_strategies_load_in_plain_torch(tmp_path: Path) -> None:
    masters = run_ranks(save_each, 2, tmp_path)[0]
    for name, expected in masters.items():
        assert any((w != w.bfloat16()).any() for w in expected.values())
        for dtype, torch_dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            directory = tmp_path / f"{name} {dtype}"
            found = export(tmp_path / name, directory, dtype)
            assert found.path == tmp_path / name / "checkpoints" / "step-000002"
            state = load_file(directory / "model.safetensors")
            assert_same_bits(state, {k: v.to(torch_dtype) for k, v in expected.items()})
            model = Classifier().to(torch_dtype)
            model.load_state_dict(state)
            assert_same_bits(dict(model.named_parameters()), state)
            # There is no description of the model.
            assert not (directory / "config.json").exists()


def checkpoint(directory: Path, tensors: dict[str, Tensor], numbers: Any = None) -> Path:
    return saving.save(directory, 1, tensors, numbers or {}, keep=1)


def test_other_dtypes_are_exported_unchanged(tmp_path: Path) -> None:
    tensors = {
        "model/weight": torch.tensor([1.0, 2.0]),
        "model/frozen": torch.tensor([1.5], dtype=torch.bfloat16),
        "model/count": torch.tensor(2**40),
        "model/exact": torch.tensor([0.1], dtype=torch.float64),
        "model/mask": torch.tensor([True]),
        "optimizer/weight/exp_avg": torch.zeros(2),
    }
    export(checkpoint(tmp_path / "run", tensors), tmp_path / "fp32")
    found = load_file(tmp_path / "fp32" / "model.safetensors")
    expected = {k.removeprefix("model/"): v for k, v in tensors.items() if k[0] == "m"}
    assert_same_bits(found, expected | {"frozen": torch.tensor([1.5])})
    assert found["frozen"].dtype == torch.float32
    export(checkpoint(tmp_path / "run", tensors), tmp_path / "fp16", "fp16")
    found = load_file(tmp_path / "fp16" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "weight": torch.float16,
        "frozen": torch.float16,
        "count": torch.int64,
        "exact": torch.float64,
        "mask": torch.bool,
    }


def test_large_models_are_sharded_with_index(tmp_path: Path) -> None:
    state = {f"model/{name}": value for name, value in make_model(3).state_dict().items()}
    path = checkpoint(tmp_path / "run", state)
    with mock.patch("distmp.export.export.write", partial(write, max_shard_size=600)):
        assert cli.main(["export", str(path), f"--to={tmp_path / 'weights'}"]) == 0
    files = sorted((tmp_path / "weights").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "weights" / "model.safetensors.index.json").read_text())
    model = make_model(4)
    found = {
        name: load_file(tmp_path / "weights" / file)[name]
        for name, file in index["weight_map"].items()
    }
    model.load_state_dict(found)
    assert_same_bits(model.state_dict(), make_model(3).state_dict())
    again = make_model(5)
    load_weights(again, tmp_path / "weights")
    assert_same_bits(again.state_dict(), make_model(3).state_dict())


class Tied(Classifier):
    """The weight of its classifier has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(*reversed(self.head.weight.shape), bias=False)
        self.other.weight = self.head.weight


@pytest.mark.parametrize("frozen", [False, True])
def test_tied_weight_is_saved_once_and_restored(tmp_path: Path, frozen: bool) -> None:
    model = Tied()
    model.head.weight.requires_grad_(not frozen)
    engine = make_engine(model=model, strategy="single", optimizer=fused_sgd)
    train(engine, 1, (((3,),),))
    export(checkpoint(tmp_path / "run", engine.state_dict()), tmp_path / "weights")
    with safe_open(tmp_path / "weights" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert names == model.state_dict().keys() - {"other.weight"}
    by_us, by_safetensors = Tied(), Tied()
    load_weights(by_us, tmp_path / "weights")
    load_with_safetensors(by_safetensors, tmp_path / "weights" / "model.safetensors")
    for found in (by_us, by_safetensors):
        assert_same_bits(found.state_dict(), model.state_dict())
        assert found.other.weight is found.head.weight


@pytest.mark.nightly
@pytest.mark.parametrize("tied", [True, False])
def test_run_continues_from_exported_weights(
    tied: bool, cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        *TINY,
        f"--data.path={corpus(cwd / 'corpus')}",
        "--optim.lr=1e-2",
        "--schedule.name=constant",
        f"--model.options={{{SIZES}, tied_head: {str(tied).lower()}}}",
    ]
    bf16 = "--precision.policy=bf16"
    assert main([*arguments, bf16, "--steps=15", "--run-dir=run"]) == 0
    assert cli.main(["export", "run", "--to", "weights/fp32"]) == 0
    output = capsys.readouterr().out
    assert output.endswith("exported run/checkpoints/step-000015 in fp32 to weights/fp32\n")
    modes = {file.name: file.stat().st_mode for file in Path("weights/fp32").iterdir()}
    new = cwd / "new"
    new.touch()
    assert modes == dict.fromkeys(("config.json", "model.safetensors"), new.stat().st_mode)
    model = load_model("weights/fp32")
    assert isinstance(model, Transformer)
    assert (model.head is None) == tied
    saved = load_file("weights/fp32/model.safetensors")
    assert_same_bits(model.state_dict(), saved)
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    # The exported weights are the trained ones.
    assert main([*arguments, "--steps=1", "--run-dir=next", "--model.weights=weights/fp32"]) == 0
    learned = read_records(cwd / "run" / "steps.jsonl")
    (continued,) = read_records(cwd / "next" / "steps.jsonl")
    assert learned[0].loss > 5
    assert continued.loss < learned[0].loss - 1
    # A resumed run loads the weights of its checkpoint.
    (cwd / "weights").rename(cwd / "elsewhere")
    more = ["--steps=2", "--run-dir=next", "--model.weights=weights/fp32", "--resume=auto"]
    assert main([*arguments, *more]) == 0


def test_average_is_exported_on_request(tmp_path: Path) -> None:
    tensors = {
        "model/weight": torch.tensor([1.0, 2.0]),
        "model/frozen": torch.tensor([3.0]),
        "callbacks/Ema/weight": torch.tensor([0.5, 0.25]),
        "callbacks/Other/weight": torch.tensor([7.0, 7.0]),
    }
    path = checkpoint(tmp_path / "run", tensors)
    export(path, tmp_path / "weights")
    export(path, tmp_path / "average", "bf16", ema=True)
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    assert {name: value.tolist() for name, value in weights.items()} == {
        "weight": [1.0, 2.0],
        "frozen": [3.0],
    }
    average = load_file(tmp_path / "average" / "model.safetensors")
    assert {name: value.tolist() for name, value in average.items()} == {
        "weight": [0.5, 0.25],
        "frozen": [3.0],
    }
    assert average["weight"].dtype == torch.bfloat16


REFUSED = {
    "no such checkpoint": (["nowhere", "--to", "new"], "checkpoint = 'nowhere': "),
    "no checkpoint in it": (["empty", "--to", "new"], "contains none"),
    "a directory that is there": (["run", "--to", "run"], "--to = 'run': exists already"),
    "a file": (["run", "--to", "file"], "--to = 'file': exists already"),
    "named like a file": (["run", "--to", "model.safetensors"], "names a directory, not a file"),
    "no directory": (["run"], "--to"),
    "here": (["../run", "--to", "."], "--to = '.': exists already"),
    "no average": (["run", "--to", "new", "--ema"], "contains no average of the weights"),
    "no such type": (["run", "--to", "new", "--dtype", "fp8"], "invalid choice: 'fp8'"),
    "beyond float16": (["run", "--to", "new", "--dtype", "fp16"], "'large' of run/step-000001 has"),
    "damaged": (["damaged", "--to", "new"], "has 0 bytes"),
    "too long": (["run", "--to", 300 * "x"], "xxx: [Errno 36] File name too long"),
    "not to be written": (["run", "--to", "file/new"], "cannot write file/new: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_failed_export_is_one_message(
    case: str, cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cwd / "empty").mkdir()
    (cwd / "file").touch()
    for name in ("run", "damaged"):
        path = checkpoint(
            Path(name), {"model/small": torch.ones(3), "model/large": torch.tensor(7e4)}
        )
    for file in path.glob("*.distcp"):
        file.write_bytes(b"")
    arguments, message = REFUSED[case]
    before = sorted(cwd.rglob("*"))
    assert cli.main(["export", *arguments]) in (1, 2)
    output = capsys.readouterr()
    assert output.err.startswith("distmp export: ")
    assert message in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""
    assert sorted(cwd.rglob("*")) == before


@pytest.mark.nightly
def test_export_needs_memory_of_one_tensor(tmp_path: Path) -> None:
    tensors = {f"model/{i}": torch.randn(4, 2**18) for i in range(24)}
    tensors |= {f"optimizer/{i}": tensor for i, tensor in enumerate(tensors.values())}
    path = checkpoint(tmp_path, tensors)
    program = (
        "import re, sys, torch, distmp.export.export as e\n"
        "e.StoredCheckpoint(e.Path(sys.argv[1])).load({'model/0': torch.empty(4, 2**18)})\n"
        # Not getrusage, which includes the peak of the parent process.
        "status = lambda: open('/proc/self/status').read()\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', status())[1]) / 1024\n"
        "open('/proc/self/clear_refs', 'w').write('5')\n"  # forgets the peak of the imports
        "before = peak()\n"
        "e.export(sys.argv[1], f'{sys.argv[2]}/weights', 'fp32')\n"
        "print(peak() - before)\n"
    )
    # Freed memory is returned to the kernel, so that resident memory is memory in use.
    done = run(python("-c", program, str(path), str(tmp_path)), tmp_path, variables=EXACT_MALLOC)
    assert done.returncode == 0, done.stderr
    # Tensors of 4 MiB, all of them in a file.
    assert 4 <= float(done.stdout) < 16


def test_export_function_raises_distmp_errors(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "run", {"model/a": torch.tensor(1e6)})
    with pytest.raises(ConfigError, match="did you mean 'fp16'"):
        export(path, tmp_path / "new", "fp15")
    with pytest.raises(CheckpointError, match="beyond the range of float16;"):
        export(path, tmp_path / "new", "fp16")
    path = checkpoint(tmp_path / "run", {"model/a": torch.tensor(torch.finfo(torch.float32).min)})
    with pytest.raises(CheckpointError, match=r"beyond the range of bfloat16; .* or fp32$"):
        export(path, tmp_path / "new", "bf16")
    # Infinities of the checkpoint are exported as they are.
    mask = torch.tensor([0.0, -math.inf])
    path = checkpoint(tmp_path / "run", {"model/a": mask})
    for dtype in ("fp32", "bf16", "fp16"):
        assert export(path, tmp_path / dtype, dtype).path == path
        assert load_file(tmp_path / dtype / "model.safetensors")["a"].tolist() == mask.tolist()


def test_failed_export_reads_no_further_weights(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "run", {"model/a": torch.ones(1), "model/b": torch.ones(1)})
    with (
        mock.patch("distmp.export.files.write_file", side_effect=OSError("disk full")),
        mock.patch.object(CheckpointWeights, "read") as read,
        pytest.raises(CheckpointError, match="disk full"),
    ):
        export(path, tmp_path / "weights")
    assert read.call_count == 0


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_transformers_load_exports_of_an_engine(cwd: Path, kind: str) -> None:
    """Also models other than causal language models."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 64, "num_labels": 3}
    model: Any
    if kind == "bert":
        sizes |= {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.BertConfig(intermediate_size=32, **sizes)
        model = transformers.BertForSequenceClassification(config)
    else:
        small = transformers.T5Config(d_model=16, d_ff=32, d_kv=8, num_layers=1, num_heads=2)
        model = transformers.T5ForConditionalGeneration(small)
    engine = make_engine(model=model, strategy="single", optimizer=fused_sgd)
    engine.save("saved")
    engine.export("exported")
    assert cli.main(["export", "saved", "--to=bf16", "--dtype=bf16"]) == 0
    for directory, dtype in (("exported", torch.float32), ("bf16", torch.bfloat16)):
        found, report = type(model).from_pretrained(
            directory, dtype="auto", output_loading_info=True
        )
        assert not any(report.values())
        assert found.dtype == dtype
        assert found.config.architectures == [type(model).__name__]
        expected = {k: v.to(dtype) for k, v in model.state_dict().items()}
        assert_same_bits(found.state_dict(), expected)


def test_missing_description_of_model_is_logged(
    cwd: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_engine(strategy="single").save("saved")
    assert cli.main(["export", "saved", "--to=weights"]) == 0
    expected = "no config.json is written: saved/step-000000 does not describe its model"
    assert expected in caplog.messages


def test_configuration_that_json_cannot_represent_is_not_stored() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    config = LlamaConfig(num_attention_heads=1, **sizes)
    config.users = {1, 2}
    assert described(LlamaForCausalLM(config)) is None


def test_home_directory_is_found_after_equals_sign(
    cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shells expand `--to ~/weights` and not `--to=~/weights`."""
    checkpoint(Path("run"), {"model/a": torch.ones(1)})
    monkeypatch.setenv("HOME", str(cwd / "home"))
    assert cli.main(["export", "run", "--to=~/weights"]) == 0
    assert (cwd / "home" / "weights" / "model.safetensors").is_file()
    assert not Path("~").exists()


def test_mount_point_is_refused_before_writing(
    cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(Path("run"), {"model/a": torch.ones(1)})
    Path("volume").mkdir()
    Path("link").symlink_to("volume")
    monkeypatch.setattr(Path, "is_mount", lambda path: path == cwd / "volume")
    for name in ("volume", "link"):
        assert cli.main(["export", "run", f"--to={name}"]) == 1
        expected = f"in use or a mount point; name a new one, such as {name}/weights\n"
        assert capsys.readouterr().err.endswith(expected)
    assert cli.main(["export", "run", "--to=volume/weights"]) == 0
    assert [path.name for path in Path("volume").iterdir()] == ["weights"]


def test_current_directory_is_not_replaced(cwd: Path) -> None:
    engine = make_engine(strategy="single")
    with pytest.raises(
        CheckpointError, match=r"cannot write \.: .*; name a new one, such as \./weights"
    ):
        engine.export(".")
    with pytest.raises(CheckpointError, match="cannot write /: "):
        engine.export("/")
    assert cwd.is_dir()
