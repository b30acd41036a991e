"""Adapters (`model.peft`): the training of plain peft, under every strategy; saved and exported."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.figures import ROOT
from distmp import cli
from distmp.checkpoint import recovery
from distmp.commands.explain.explanation import explain
from distmp.commands.explain.report import report
from distmp.config import load
from distmp.data.token_metadata import TokenMetadata
from distmp.distributed.world import World
from distmp.engine.engine import Engine
from distmp.errors import ConfigError
from distmp.export.export import CheckpointWeights, write_adapter
from distmp.models import adapters
from distmp.models.transformer import Transformer, TransformerConfig
from distmp.train import main
from distmp.training.components import build_engine, build_model_and_data, start_from_weights
from distmp.training.run_fingerprint import describe_model
from distmp.utils.flat_shard import gathered
from distmp.utils.live_bytes import MASTERS
from tests.models.test_huggingface import GPT2, LLAMA, build, directory, distance
from tests.ranks import run_ranks
from tests.reference import assert_same_bits
from tests.torchrun import corpus

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
AUTO = transformers.AutoModelForCausalLM

STEPS, RATE = 3, 1e-2
LORA = {"r": 3, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"]}
LORA_GPT2 = {
    "r": 2,
    "use_rslora": True,
    "target_modules": ["c_attn"],
    "rank_pattern": {"h.1.attn.c_attn": 4},
}
CASES = [
    ("llama", "ddp", "fp32"),
    ("llama", "shard_optimizer", "bf16"),
    ("llama", "fsdp", "bf16"),
    ("llama", "hsdp", "fp16"),
    ("gpt2", "ddp", "bf16"),
    ("gpt2", "fsdp", "fp32"),
]


def save_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<unk>": 0, "dog": 1, "fox": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)


def save_models(path: Path) -> None:
    """Save a Llama with a tokenizer, and a GPT-2, each with random weights."""
    for name, values in (("llama", LLAMA), ("gpt2", GPT2)):
        config = transformers.AutoConfig.from_pretrained(directory(path / f"{name}-config", values))
        torch.manual_seed(0)
        AUTO.from_config(config, dtype=torch.float32).save_pretrained(path / name)
    save_tokenizer(path / "llama")


def lora(name: str) -> dict[str, Any]:
    return LORA if name == "llama" else LORA_GPT2


def settings(path: Path, model: str, strategy: str, policy: str) -> list[str]:
    return [
        f"--model.name=hf:{path / model}",
        f"--model.peft={json.dumps(lora(model))}",
        f"--data.path={path / 'corpus'}",
        f"--strategy={strategy.replace('shard_optimizer', 'ddp')}",
        *(["--shard-optimizer"] if strategy == "shard_optimizer" else []),
        *(["--sharding.shard-size=1"] if strategy == "hsdp" else []),
        f"--precision.policy={policy}",
        f"--optim.lr={RATE}",
        *("--optim.weight-decay=0", "--optim.max-norm=null", "--schedule.name=constant"),
        *("--data.sequence-length=16", "--batch.global-batch-size=4", "--batch.microbatch-size=1"),
        "--validation.final-samples=1",
    ]


def tokens(step: int) -> Tensor:
    return torch.randint(300, (4, 17), generator=torch.Generator().manual_seed(step))


def full(engine: Engine) -> dict[str, Tensor]:
    return {
        name.removeprefix("model/"): gathered(tensor).detach().clone()
        for name, tensor in engine.state_dict().items()
        if name.startswith("model/")
    }


def train_all(path: Path) -> dict[str, Any]:
    """Train adapters each way on this rank's half of the data, and save them."""
    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    results = {}
    for model, strategy, policy in CASES:
        config = load(settings(path, model, strategy, policy))
        world = World.current("cpu")
        parts = build_model_and_data(config, world)
        engine = build_engine(config, parts, world, policy=policy, attribution=False)
        start_from_weights(parts, engine)
        start = full(engine)
        for step in range(STEPS):
            rows = tokens(step)[2 * rank : 2 * rank + 2].split(1)
            engine.step([{"inputs": row[:, :-1], "targets": row[:, 1:]} for row in rows])
        case = f"{model}-{strategy}-{policy}"
        engine.save(path / "saved" / case)
        described = describe_model(engine.model, config)["adapter"]
        results[case] = start, full(engine), held_bytes(engine), described
    return results


def held_bytes(engine: Engine) -> dict[str, int]:
    """Return the bytes of this rank: frozen weights, and what is held for trained ones."""
    frozen = [p for p in engine.model.parameters() if not p.requires_grad]
    local = [p.to_local() if hasattr(p, "to_local") else p for p in frozen]
    updated = {name: t for name, t in engine.state_dict().items() if name.startswith("optimizer/")}
    return {
        "frozen": sum(p.nbytes for p in local),
        "frozen elements": sum(p.numel() for p in local),
        "frozen in FP32": sum(p.numel() for p in local if p.dtype == torch.float32),
        "optimizer": len({name.rpartition("/")[0] for name in updated}),
    }


def plain_training(path: Path, name: str, start: dict[str, Tensor]) -> dict[str, Tensor]:
    """Train with peft alone, in float64 on all data, from the same initial adapters."""
    base = AUTO.from_pretrained(path / name, dtype=torch.float64)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **lora(name)))
    model = model.double()
    own = {key: value for key, value in start.items() if adapters.is_adapter(key)}
    named = {key.removeprefix("base_model.model."): p for key, p in model.named_parameters()}
    trained = {key: p for key, p in named.items() if p.requires_grad}
    assert trained.keys() == own.keys()
    with torch.no_grad():
        for key, value in own.items():
            trained[key].copy_(value)
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, weight_decay=0)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(input_ids=tokens(step), labels=tokens(step)).loss.backward()
        optimizer.step()
    return {key: p.detach() for key, p in trained.items()}


@pytest.mark.nightly
def test_adapter_training_agrees_with_peft_under_strategies(tmp_path: Path) -> None:
    save_models(tmp_path)
    corpus(tmp_path / "corpus")
    results = run_ranks(train_all, 2, tmp_path, timeout=150)[0]
    for model, strategy, policy in CASES:
        case = f"{model}-{strategy}-{policy}"
        start, weights, held, described = results[case]
        expected = plain_training(tmp_path, model, start)
        trained = {name: weights[name] for name in expected}
        assert all(value.dtype == torch.float32 for value in trained.values()), case
        assert distance(trained, expected, start) < (1e-4 if policy == "fp32" else 0.25), case
        frozen = start.keys() - trained.keys()
        assert_same_bits({n: weights[n] for n in frozen}, {n: start[n] for n in frozen})
        check_bytes(case, held, trained)
        # peft loads the exported directory, and computes with the FP32 adapters.
        saved = recovery.resolve(str(tmp_path / "saved" / case), Path(), setting="checkpoint")
        assert saved is not None
        exported = CheckpointWeights(saved, torch.float32, adapters=True)
        write_adapter(tmp_path / case, exported, described, tmp_path / model)
        base = AUTO.from_pretrained(tmp_path / model)
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / case)
        state = {k.removeprefix("base_model.model."): v for k, v in loaded.named_parameters()}
        assert_same_bits({name: state[name].detach() for name in trained}, trained)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "llama-fsdp-bf16")


def check_bytes(case: str, held: dict[str, int], trained: dict[str, Tensor]) -> None:
    """Frozen weights have the compute dtype, except for norms, and no optimizer state."""
    low_precision = held["frozen elements"] - held["frozen in FP32"]
    assert held["frozen"] == 2 * low_precision + 4 * held["frozen in FP32"]
    if "fp32" not in case:
        assert low_precision > 0.9 * held["frozen elements"], case
    assert held["optimizer"] <= len(trained), case


@pytest.mark.nightly
def test_adapter_run_resumes_and_exports(
    cwd: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    save_models(cwd)
    (cwd / "corpus").mkdir()
    (torch.arange(4000) % 300).numpy().tofile(cwd / "corpus" / "ids")
    TokenMetadata("int64", 300, {"ids": 4000}).write(cwd / "corpus")
    arguments = [*settings(cwd, "llama", "single", "bf16"), "--data.source=tokens"]
    assert main([*arguments, "--steps=6", "--run-dir=whole"]) == 0
    assert "10,480 parameters, 480 of them trained" in capsys.readouterr().out
    early = [*arguments, "--run-dir=parts", "--steps=6"]
    assert main([*early, "--steps=3"]) == 0
    assert main([*early, "--resume=auto"]) == 0
    for run in ("whole", "parts"):
        assert cli.main(["export", run, f"--to={run}-adapter"]) == 0
    first, second = (
        load_file(f"{run}-adapter/adapter_model.safetensors") for run in ("whole", "parts")
    )
    assert_same_bits(first, second)
    assert any(bool(value.any()) for name, value in first.items() if "lora_B" in name)
    assert transformers.AutoTokenizer.from_pretrained("whole-adapter").encode("fox dog") == [2, 1]
    # A checkpoint does not need the directory of the model, except for the tokenizer.
    (cwd / "llama").rename(cwd / "gone")
    assert cli.main(["export", "whole", "--to=later"]) == 0
    assert_same_bits(load_file("later/adapter_model.safetensors"), first)
    assert "has no readable files of one" in caplog.text


def test_explain_predicts_gradients_of_adapters_only(tmp_path: Path) -> None:
    save_models(tmp_path)
    corpus(tmp_path / "corpus")
    words = ["--batch.global-batch-size=1024", "--batch.microbatch-size=1"]
    found = explain(load([*settings(tmp_path, "llama", "ddp", "bf16"), *words]), 1024)
    trained = sum(group.parameters for group in found.groups if group.trained)
    assert all("lora_" in group.name for group in found.groups if group.trained)
    # Each adapter is padded to 32 elements.
    assert found.memory[MASTERS] == pytest.approx(4 * trained, rel=0.25)
    (gradients,) = (each for each in found.communication if each.purpose == "gradients")
    assert gradients.nbytes == pytest.approx(2 * 4 * trained, rel=0.25)
    (row,) = (line for line in report(found) if line.startswith("model.embed_tokens"))
    assert row.split()[2:] == ["bf16", "-", "bf16", "bf16", "-", "-"]


@pytest.mark.nightly
def test_explain_predicts_16_bit_frozen_shards(tmp_path: Path) -> None:
    save_models(tmp_path)
    corpus(tmp_path / "corpus")
    found = explain(load(settings(tmp_path, "llama", "fsdp", "bf16")), 2)
    assert found.differences == []
    stored = {group.name: group.stored for group in found.groups}
    assert stored["model.layers.*.mlp.up_proj"] == torch.bfloat16
    assert stored["model.layers.*.mlp.down_proj.lora_A.default"] == torch.float32


def test_adapters_apply_to_transformer_and_user_models(tmp_path: Path) -> None:
    model = Transformer(TransformerConfig(32, 8, 2, 16, 2, 24, tied_head=False))
    adapters.add_adapters(model, {"r": 2, "target_modules": ["down", "query_key_value"]}, seed=1)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 2
    assert trained == {n for n in dict(model.named_parameters()) if adapters.is_adapter(n)}
    users = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    adapters.add_adapters(users, {"r": 2, "target_modules": "0"}, seed=1)
    assert [n for n, p in users.named_parameters() if p.requires_grad] == [
        "0.lora_A.default.weight",
        "0.lora_B.default.weight",
    ]
    assert not users.get_parameter("0.lora_B.default.weight").any()
    with pytest.raises(ConfigError, match="the model has adapters already"):
        adapters.add_adapters(users, {"target_modules": "2"}, seed=1)


class ReadsWeight(nn.Module):
    """Reads the weight of a layer without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 8)
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 257)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.linear(self.first(self.embedding(ids)), self.head.weight)


def test_ineffective_adapters_are_reported(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus(cwd / "corpus")
    arguments = [
        f"--model.name={ReadsWeight.__module__}:ReadsWeight",
        *settings(cwd, "llama", "single", "bf16")[2:],
        "--steps=2",
    ]
    assert main([*arguments, "--model.peft={r: 2, target_modules: [first, head]}"]) == 0
    output = capsys.readouterr().out
    assert output.count("model.peft: 2 parameters of adapters have had no gradient, head.lora") == 1
    assert main([*arguments, "--model.peft={r: 2, target_modules: [first]}"]) == 0
    assert "model.peft" not in capsys.readouterr().out
    options = ["--model.options={layers: 1}", "--model.peft={r: 2, target_modules: [down]}"]
    assert main([*options, *arguments[1:], "--steps=1"]) == 0
    assert "the model has random weights, and they stay frozen" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"rank": 4}, r"^model\.peft\.rank = 4: choose one of .*, r, "),
        ({"r": "many", "target_modules": ["down"]}, r"refused by peft: "),
        ({"bias": "all"}, r"^model\.peft\.bias = 'all': choose one of"),
        (
            {"target_modules": ["missing"]},
            r"refused by peft: .*the model has the linear layers down,",
        ),
        ({}, r"^model\.peft\.target_modules = None: name layers .* down, gate_up, output"),
        ({"target_modules": ["head"]}, r"head computes more than a product \(Head\); leave it out"),
        ({"target_modules": ["embedding"]}, r"embedding is a TokenEmbedding; leave it out"),
        ({"rank_pattern": {"up": 4}, "target_modules": ["down"]}, r"did not match any .* ignored"),
        ({"r": 0, "target_modules": ["down"]}, r"refused by peft: .*`r`"),
        ({"target_modules": "down", "up": None}, r"^model\.peft\.up = None: "),
        ({"target_modules": "("}, r"refused by peft: .*unterminated subpattern"),
        (
            {"target_modules": ["down", "dwon"]},
            r"peft\.target_modules = 'dwon': selects no layer; the model has .* layers down,",
        ),
        (
            {"target_modules": ["down"], "exclude_modules": ["missing"]},
            r"peft\.exclude_modules = 'missing': selects no layer",
        ),
        (
            {"target_modules": ["down"], "exclude_modules": "down"},  # an expression of full names
            r"exclude_modules=down but no modules were excluded",
        ),
        ({"target_modules": ["down"], "lora_alpha": 0}, r"peft\.lora_alpha = 0: use a finite"),
        ({"alpha_pattern": {"down": float("nan")}}, r"peft\.lora_alpha = nan: use a finite"),
        ({"target_modules": ["down"], "lora_dropout": 1}, r"peft\.lora_dropout = 1: use 0 or"),
        ({"init_lora_weights": 1}, r"peft\.init_lora_weights = 1: use true or"),
        ({"init_lora_weights": "pissa"}, r"peft\.init_lora_weights = 'pissa': use true or"),
    ],
)
def test_misleading_adapter_settings_are_refused(values: dict[str, Any], problem: str) -> None:
    model = Transformer(TransformerConfig(32, 8, 2, 16, 2, 24, tied_head=False))
    with pytest.raises(ConfigError, match=problem):
        adapters.add_adapters(model, values, seed=1)


@pytest.mark.parametrize("prefix", ["", "blocks.", "model.blocks."])
def test_indices_of_layers_select_their_adapters(prefix: str) -> None:
    def adapted(indices: Any) -> list[str]:
        experts = (
            nn.ModuleList(nn.ModuleDict({"up": nn.Linear(2, 2)}) for _ in "12") for _ in "123"
        )
        model: nn.Module = nn.ModuleList(nn.ModuleDict({"experts": each}) for each in experts)
        for name in reversed(prefix.split(".")[:-1]):
            model = nn.ModuleDict({name: model})
        values = {"target_modules": ["up"], "layers_to_transform": indices}
        adapters.add_adapters(model, values, seed=1)
        names = [n.removeprefix(prefix) for n, _ in model.named_parameters() if "lora_A" in n]
        return [name.partition(".up.")[0] for name in names]

    assert adapted([1]) == adapted(1) == ["1.experts.0", "1.experts.1"]
    assert len(adapted([0, 1, 2])) == len(adapted([])) == 6
    for wrong in (3, -1, 21):
        with pytest.raises(ConfigError, match=rf"layers_to_transform = {wrong}: selects no layer"):
            adapted([0, wrong])


def test_indices_of_layers_apply_to_default_layers(tmp_path: Path) -> None:
    model = build(directory(tmp_path, LLAMA))
    adapters.add_adapters(model, {"layers_to_transform": [1]}, seed=1)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(names) == 4
    assert all(name.startswith("model.layers.1.self_attn.") for name in names)


def test_page_lists_all_peft_settings() -> None:
    section = (
        (ROOT / "docs" / "huggingface.md").read_text().partition("## LoRA")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert listed == {*adapters.KNOWN}
    assert listed <= {field.name for field in dataclasses.fields(peft.LoraConfig)}


def test_tied_weight_is_not_adapted() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    with pytest.raises(ConfigError, match="0 shares its weight with another layer"):
        adapters.add_adapters(nn.Sequential(first, second), {"target_modules": "0"}, seed=1)


def test_missing_peft_is_reported() -> None:
    find = importlib.util.find_spec
    hidden = lambda name, *rest: None if name == "peft" else find(name, *rest)  # noqa: E731
    with (
        mock.patch.object(importlib.util, "find_spec", hidden),
        pytest.raises(ConfigError, match=r"needs peft; run pip install 'distmp\[hf\]'"),
    ):
        load(["--model.peft={r: 4}"])
