from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from distmp.config import RunConfig, load
from distmp.distributed.world import World
from distmp.engine.engine import Engine
from distmp.errors import ConfigError
from distmp.export.export import export
from distmp.export.files import write
from distmp.export.running import EngineWeights
from distmp.models import huggingface
from distmp.models.architecture import build_model
from distmp.models.loss import next_token_loss, takes_targets
from distmp.models.settings import ModelConfig
from distmp.telemetry.records import read_records
from distmp.train import main
from distmp.training.components import build_engine, build_model_and_data, start_from_weights
from distmp.utils.deferred import build_deferred
from distmp.utils.settings import from_mapping
from distmp.utils.settings.yaml_files import read_yaml
from tests.ranks import run_ranks
from tests.reference import assert_same_bits
from tests.torchrun import corpus

transformers = pytest.importorskip("transformers")
AUTO = transformers.AutoModelForCausalLM

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 300,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
}
STEPS = 3
CASES = {
    "llama": [("ddp", "fp32"), ("ddp", "bf16"), ("sharded ddp", "bf16"), ("fsdp", "bf16")],
    "gpt2": [("fsdp", "fp32")],
}


def directory(path: Path, values: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(values))
    return path


def tokens(step: int) -> Tensor:
    return torch.randint(300, (4, 17), generator=torch.Generator().manual_seed(step))


def build(path: Path) -> torch.nn.Module:
    torch.manual_seed(0)
    return huggingface.build(f"hf:{path}", {}, 300, 16)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def train_all(sources: dict[str, Path], out: Path) -> dict[str, tuple[float, dict[str, Tensor]]]:
    """Train each model each way on this rank's half of the data; save it; return its weights."""
    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    results = {}
    for name, path in sources.items():
        for strategy, policy in CASES[name]:
            model = build(path)
            assert huggingface.prepare_loss(model)
            engine = Engine(
                model,
                next_token_loss,
                adamw,
                strategy=strategy.split()[-1],
                policy=policy,
                shard_optimizer=strategy == "sharded ddp",
                device="cpu",
            )
            for step in range(STEPS):
                local = tokens(step)[2 * rank : 2 * rank + 2]
                batches = [{"inputs": row[:, :-1], "targets": row[:, 1:]} for row in local.split(1)]
                numbers = engine.step(batches).numbers
            state = engine.state_dict().items()
            weights = [(k[6:], v) for k, v in state if k.startswith("model/")]
            case = f"{name}-{strategy}-{policy}"
            saved = EngineWeights(engine.state_dict(), keep=rank == 0)
            described = huggingface.configuration(model)
            write(out / case, saved, described, torch.float32, 2**13, writes=rank == 0)
            if strategy == "sharded ddp":
                continue  # its file is compared with that of the unsharded optimizer below
            whole = {k: v.full_tensor() if strategy == "fsdp" else v for k, v in weights}
            results[case] = numbers.loss, {k: v.clone() for k, v in whole.items()}
    return results


def plain_training(path: Path) -> tuple[float, dict[str, Tensor]]:
    """Train on all data with the loss of transformers, in float64."""
    model = build(path).double()
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=tokens(step), labels=tokens(step)).loss
        loss.backward()
        optimizer.step()
    return loss.item(), dict(model.named_parameters())


def test_training_agrees_with_transformers_and_reloads(tmp_path: Path) -> None:
    untied = {**LLAMA, "tie_word_embeddings": False}
    sources = {"llama": directory(tmp_path / "l", untied), "gpt2": directory(tmp_path / "g", GPT2)}
    results = run_ranks(train_all, 2, sources, tmp_path, timeout=150)[0]
    for name, path in sources.items():
        start = dict(build(path).named_parameters())
        expected_loss, expected = plain_training(path)
        for strategy, policy in CASES[name]:
            case = f"{name}-{strategy}-{policy}"
            loss, weights = results[case.replace("sharded ", "")]
            exact = policy == "fp32"
            assert loss == pytest.approx(expected_loss, rel=1e-5 if exact else 1e-2), case
            # Tied embeddings are one weight, under the name that transformers gives it.
            assert weights.keys() == expected.keys()
            assert distance(weights, expected, start) < (1e-4 if exact else 0.15), case
            saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / case)
            assert type(saved).__name__ in ("LlamaForCausalLM", "GPT2LMHeadModel")
            found = dict(saved.named_parameters())
            assert found.keys() == weights.keys()
            assert [k for k in found if not torch.equal(found[k], weights[k])] == []


def distance(
    found: dict[str, Tensor], expected: dict[str, Tensor], start: dict[str, Tensor]
) -> float:
    """Return the difference of two trainings, relative to the change in the second one."""
    apart = torch.cat([(found[k].double() - expected[k]).flatten() for k in expected])
    moved = torch.cat([(expected[k] - start[k]).flatten() for k in expected])
    return float((apart.norm() / moved.norm()).detach())


@pytest.mark.nightly
def test_run_starts_from_weights_of_another(cwd: Path) -> None:
    data = corpus(cwd / "corpus")
    arguments = [
        f"--data.path={data}",
        "--data.sequence-length=32",
        "--batch.global-batch-size=4",
        "--batch.microbatch-size=2",
        "--precision.policy=bf16",
        "--validation.final-samples=8",
        "--schedule.name=constant",
        "--optim.lr=1e-2",
    ]
    source = directory(cwd / "tiny", LLAMA)
    first = ["--model.name=hf:tiny", "--steps=15", "--run-dir=first", *arguments]
    assert main(first) == 0
    config = from_mapping(RunConfig, read_yaml(cwd / "first" / "config.yaml"))
    assert config.model.name == "hf:tiny"
    records = read_records(cwd / "first" / "steps.jsonl")
    export("first", "exported")
    assert main(["--model.name=hf:exported", "--steps=1", "--run-dir=second", *arguments]) == 0
    (continued,) = read_records(cwd / "second" / "steps.jsonl")
    assert records[0].loss > 5.5
    assert continued.loss < records[0].loss - 1
    assert (source / "config.json").exists()
    saved = json.loads((cwd / "exported" / "config.json").read_text())
    assert saved["architectures"] == ["LlamaForCausalLM"]
    assert saved["dtype"] == "float32"
    assert saved["use_cache"]
    # The same if the original directory of the model is removed.
    source.rename(cwd / "gone")
    weights = AUTO.from_pretrained("exported").state_dict()
    for dtype in (torch.float32, torch.bfloat16):
        word = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
        export("first", word, word)
        again = AUTO.from_pretrained(word)
        assert type(again).__name__ == "LlamaForCausalLM"
        assert again.dtype == dtype
        assert again.lm_head.weight is again.model.embed_tokens.weight
        assert_same_bits(again.state_dict(), {k: v.to(dtype) for k, v in weights.items()})
        assert "lm_head.weight" not in load_file(f"{word}/model.safetensors")
    # And to start a run with the same architecture.
    options = ["--model.name=hf:exported/config.json", "--model.weights=bf16"]
    assert main([*options, "--steps=1", "--run-dir=third", *arguments]) == 0
    (third,) = read_records(cwd / "third" / "steps.jsonl")
    assert third.loss == pytest.approx(continued.loss, abs=0.1)


def started(
    tmp_path: Path, name: str, unmatched: tuple[str, ...] = (), **options: Any
) -> dict[str, Tensor]:
    """Return the model's state before the first step of a run."""
    texts = corpus(tmp_path / "corpus")
    config = load(
        [
            f"--model.name={name}",
            f"--model.options={json.dumps(options)}",
            f"--data.path={texts}",
            *("--data.sequence-length=16", "--batch.global-batch-size=2"),
            *("--batch.microbatch-size=2", "--precision.policy=fp32"),
            *(["--model.unmatched-weights", *unmatched] if unmatched else []),
        ]
    )
    world = World.current("cpu")
    parts = build_model_and_data(config, world)
    engine = build_engine(config, parts, world, policy="fp32", attribution=False)
    start_from_weights(parts, engine)
    return engine.model.state_dict()


def test_weights_come_from_directory_or_are_random(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = directory(tmp_path / "tiny", LLAMA)
    first = build(path)
    first.save_pretrained(tmp_path / "weights", max_shard_size="10KB")
    assert len(list((tmp_path / "weights").glob("*.safetensors"))) > 1
    loaded = started(tmp_path, f"hf:{tmp_path}/weights")
    assert_same_bits(loaded, first.state_dict())
    random = started(tmp_path, f"hf:{tmp_path}/weights/config.json", num_hidden_layers=3)
    assert "model.layers.2.mlp.up_proj.weight" in random
    assert not torch.equal(random["lm_head.weight"], loaded["lm_head.weight"])
    assert caplog.text == ""


def test_damaged_and_stale_files_are_handled(tmp_path: Path) -> None:
    first = build(directory(tmp_path / "tiny", LLAMA))
    path = tmp_path / "weights"
    first.save_pretrained(path, max_shard_size="10KB")
    shards = sorted(path.glob("*.safetensors"))
    # Left over from another model; saving again with other sizes of the files does this.
    stale = {name: torch.zeros_like(tensor) for name, tensor in first.state_dict().items()}
    del stale["lm_head.weight"]  # tied
    save_file(stale, path / "model-00099-of-00099.safetensors", {"format": "pt"})
    assert_same_bits(started(tmp_path, f"hf:{path}"), first.state_dict())
    os.truncate(shards[1], shards[1].stat().st_size - 10)
    with pytest.raises(ConfigError, match=f"{shards[1]} cannot be read: .*; copy or") as caught:
        started(tmp_path, f"hf:{path}")
    assert (caught.value.setting, caught.value.value) == ("model.name", f"hf:{path}")
    for file in path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"index\.json names files that are not in the directory"):
        started(tmp_path, f"hf:{path}")


def test_converted_weights_agree_with_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Names without the prefix of the model; and tensors that it does not have."""
    first = build(directory(tmp_path / "tiny", LLAMA))
    first.save_pretrained(tmp_path / "more")
    file = tmp_path / "more" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.inv_freq": torch.ones(4)}, file, {"format": "pt"})
    assert_same_bits(started(tmp_path, f"hf:{tmp_path}/more"), first.state_dict())
    assert caplog.text == ""
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, file, {"format": "pt"})
    assert_same_bits(started(tmp_path, f"hf:{tmp_path}/more"), first.state_dict())
    assert "every rank loads the whole model (missing: " in caplog.text


GEMMA2 = {**LLAMA, "model_type": "gemma2", "head_dim": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize("values", [LLAMA, GPT2])
def test_models_are_built_without_memory(values: dict[str, Any], tmp_path: Path) -> None:
    model = build_deferred(lambda: build(directory(tmp_path, values)), 0)
    assert model.get_input_embeddings().weight.is_meta


@pytest.mark.parametrize(
    ("values", "prepared"),
    [
        (LLAMA, True),
        (GPT2, True),
        ({**LLAMA, "tie_word_embeddings": False}, True),
        ({**GEMMA2, "final_logit_softcapping": 30.0}, False),
        ({**GEMMA2, "final_logit_softcapping": None}, True),
        ({**LLAMA, "model_type": "cohere", "logit_scale": 0.06}, False),
    ],
)
def test_loss_inside_agrees_with_logits(
    tmp_path: Path, values: dict[str, Any], prepared: bool
) -> None:
    path = directory(tmp_path / "model", values)
    model, other = build(path), build(path)
    assert huggingface.prepare_loss(model) is prepared
    batch = {"inputs": tokens(1)[:, :-1], "targets": tokens(1)[:, 1:]}
    results = []
    for each in (model, other):
        loss, _ = next_token_loss(each, batch)
        loss.backward()
        results.append((loss, *(parameter.grad for parameter in each.parameters())))
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    # A call without targets returns logits again.
    output = model(batch["inputs"])
    assert output.logits.shape == (4, 16, 300)
    assert output.past_key_values is None
    model.save_pretrained(tmp_path / "saved")
    assert_same_bits(AUTO.from_pretrained(tmp_path / "saved").state_dict(), model.state_dict())


def test_head_with_bias_returns_logits(tmp_path: Path) -> None:
    model = build(directory(tmp_path / "model", LLAMA))
    model.lm_head = nn.Linear(model.config.hidden_size, 300)
    assert not huggingface.prepare_loss(model)
    assert not takes_targets(model)


def test_load_balancing_loss_is_refused(tmp_path: Path) -> None:
    sizes = {"num_key_value_heads": 2, "num_local_experts": 2, "output_router_logits": True}
    model = build(directory(tmp_path / "model", {**LLAMA, "model_type": "mixtral", **sizes}))
    with pytest.raises(ConfigError, match=r"^model\.options\.output_router_logits = True: adds a"):
        huggingface.prepare_loss(model)


def test_invalid_model_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    path = directory(tmp_path / "tiny", LLAMA)
    for name, message in (
        (f"hf:{tmp_path}/nowhere", "there is no file .*config.json"),
        (f"hf:{empty}", "Nothing is downloaded"),
        ("hf:", "there is no file|name a local directory"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            ModelConfig(name=name)
        assert caught.value.setting == "model.name"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="run pip install 'distmp"):
        ModelConfig(name=f"hf:{path}")


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ({"model_type": "lama"}, {}, "refused by transformers: .*lama"),
        ({"model_type": "t5"}, {}, "refused by transformers: Unrecognized configuration class"),
        ({"hidden_size": 16}, {}, "refused by transformers: Unrecognized model"),
        (
            {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}},
            {},
            "refused by transformers: .*custom code",
        ),
        (LLAMA, {"num_layer": 3}, "has no such value; did you mean"),
        (LLAMA | {"vocab_size": 100}, {}, "vocab_size = 100 for 257 token ids"),
        (LLAMA, {"max_position_embeddings": 8}, "max_position_embeddings = 8 for 16 tokens"),
        (LLAMA | {"hidden_size": 17}, {}, "refused by transformers"),
    ],
)
def test_unbuildable_configurations_are_refused(
    tmp_path: Path, values: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    path = directory(tmp_path / "model", values)
    with pytest.raises(ConfigError, match=message):
        build_model(ModelConfig(name=f"hf:{path}", options=options), 257, 16)


@pytest.mark.parametrize(
    ("values", "options"),
    [
        (LLAMA, {"num_attention_heads": 4}),
        (LLAMA | {"model_type": "qwen2"}, {"num_hidden_layers": 1}),
        (LLAMA | {"model_type": "qwen2"}, {"use_sliding_window": True}),
        (LLAMA | {"rope_theta": 1e6}, {"rope_theta": 5e5}),
        (LLAMA | {"rope_theta": 1e6}, {"attn_implementation": "eager"}),
        (GPT2, {"hidden_size": 32}),
    ],
)
def test_options_replace_values_in_file(
    tmp_path: Path, values: dict[str, Any], options: dict[str, Any]
) -> None:
    """Also for values that the configuration derives from the replaced ones."""
    by_option, in_file = (
        huggingface.build(f"hf:{directory(tmp_path, stored)}", given, 257, 16).config
        for stored, given in ((values, options), (values | options, {}))
    )
    assert by_option.to_diff_dict() == in_file.to_diff_dict()
    directory(tmp_path, by_option.to_diff_dict())
    assert build(tmp_path).config.to_diff_dict() == in_file.to_diff_dict()


def test_options_change_single_values_of_rotary_embedding(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    path = directory(tmp_path, LLAMA | {"rope_theta": 1e6, "rope_scaling": scaling})
    model = huggingface.build(f"hf:{path}", {"rope_parameters": {"factor": 4.0}}, 257, 16)
    expected = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}
    assert model.config.rope_parameters == expected


@pytest.mark.parametrize("converted", [False, True])
def test_weights_unknown_to_model_are_refused(tmp_path: Path, converted: bool) -> None:
    build(directory(tmp_path / "tiny", LLAMA)).save_pretrained(tmp_path / "weights")
    file = tmp_path / "weights" / "model.safetensors"
    if converted:
        tensors = load_file(file)
        bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        save_file(bare, file, {"format": "pt"})
    prefix = "" if converted else "model."
    name = f"hf:{tmp_path}/weights"
    with pytest.raises(ConfigError) as caught:
        started(tmp_path, name, num_hidden_layers=1)
    assert str(caught.value).startswith(
        f"model.name = {name!r}: weights of the directory are not in the model: "
        f"{prefix}layers.1.input_layernorm.weight, "
    )
    assert "correct model.options = {'num_hidden_layers': 1}, or allow" in str(caught.value)
    allowed = (f"{prefix}layers.1.*",)
    found = started(tmp_path, name, unmatched=allowed, num_hidden_layers=1)
    assert "model.layers.1.mlp.up_proj.weight" not in found


@pytest.mark.parametrize("converted", [False, True])
def test_tied_weights_with_different_values_are_refused(tmp_path: Path, converted: bool) -> None:
    untied = build(directory(tmp_path / "tiny", {**LLAMA, "tie_word_embeddings": False}))
    for shared in (False, True):
        tensors = {**untied.state_dict()}
        if shared:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        untied.save_pretrained(tmp_path / "weights")
        bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        file = tmp_path / "weights" / "model.safetensors"
        save_file(bare if converted else tensors, file, {"format": "pt"})
        name = f"hf:{tmp_path}/weights"
        if shared:
            found = started(tmp_path, name, tie_word_embeddings=True)
            assert torch.equal(found["lm_head.weight"], tensors["lm_head.weight"])
            continue
        with pytest.raises(ConfigError, match=r"has other values for lm_head\.weight than .*tie_"):
            started(tmp_path, name, tie_word_embeddings=True)


def test_mismatched_weights_are_refused(tmp_path: Path) -> None:
    first = build(directory(tmp_path / "tiny", LLAMA))
    first.save_pretrained(tmp_path / "weights")
    name = f"hf:{tmp_path}/weights"
    with pytest.raises(ConfigError, match=r"not in the directory: model\.layers\.2.* and 4 more"):
        started(tmp_path, name, num_hidden_layers=3)
    with pytest.raises(ConfigError, match=r"other shapes .*: model\.layers\.0\.mlp\.down_proj"):
        started(tmp_path, name, intermediate_size=24)
    found = [started(tmp_path, name, ("lm_head.*",), tie_word_embeddings=False) for _ in range(2)]
    assert_same_bits(*found)
    head, embedding = found[0]["lm_head.weight"], found[0]["model.embed_tokens.weight"]
    assert torch.equal(embedding, first.model.embed_tokens.weight)
    assert 0.5 < float(head.std() / embedding.std()) < 2
    assert not torch.equal(head, embedding)
    (tmp_path / "weights" / "adapter_config.json").touch()
    with pytest.raises(ConfigError, match="has adapters of peft"):
        started(tmp_path, name)
    (tmp_path / "weights" / "adapter_config.json").unlink()
    (tmp_path / "weights" / "model.safetensors").rename(tmp_path / "weights" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="can run code when it is read"):
        started(tmp_path, name)
