from __future__ import annotations

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from distmp.distributed.progress import current_phase
from distmp.errors import CheckpointError, ConfigError
from distmp.export.files import divided, in_file_order, write, write_file
from distmp.export.running import EngineWeights
from distmp.export.weights import load_model, load_weights
from distmp.models.architecture import described
from distmp.models.transformer import Transformer, TransformerConfig
from tests.reference import assert_same_bits, make_model

SMALL = TransformerConfig(
    vocabulary_size=11, sequence_length=8, layers=1, dimension=8, heads=2, hidden=8
)


def state(seed: int = 3) -> dict[str, Tensor]:
    return dict(make_model(seed).state_dict())


def saved(directory: Path, weights: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    directory.mkdir(exist_ok=True)
    save_file(weights, directory / name)
    return directory


def test_weights_load_from_directory_or_file(tmp_path: Path) -> None:
    directory = saved(tmp_path / "weights", state(), "of_others.safetensors")
    for path in (directory, str(directory), directory / "of_others.safetensors"):
        model = make_model(0)
        load_weights(model, path)
        assert_same_bits(model.state_dict(), state())


def test_loading_weights_counts_as_progress(tmp_path: Path) -> None:
    """Files are mapped to memory, so that the process reads no bytes."""
    directory = saved(tmp_path / "weights", state())
    before = current_phase.now.since
    load_weights(make_model(0), directory)
    assert current_phase.now.since > before


def test_configuration_of_another_program_is_not_read(tmp_path: Path) -> None:
    directory = saved(tmp_path / "weights", state())
    (directory / "config.json").write_text('{"architecture": "resnet50"}')
    model = make_model(0)
    load_weights(model, directory)
    assert_same_bits(model.state_dict(), state())


def test_values_are_converted_to_model_dtypes(tmp_path: Path) -> None:
    halves = {name: value.bfloat16() for name, value in state().items()}
    model = make_model(0)
    load_weights(model, saved(tmp_path / "weights", halves))
    assert_same_bits(model.state_dict(), {name: value.float() for name, value in halves.items()})
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_all_mismatches_are_listed_before_loading(tmp_path: Path) -> None:
    weights = state()
    del weights["first.bias"]
    weights["head.weight"] = weights["head.weight"][:, :3].contiguous()
    weights |= {f"extra{i}": torch.ones(1) for i in range(7)}
    model = make_model(0)
    with pytest.raises(ConfigError) as caught:
        load_weights(model, saved(tmp_path / "weights", weights))
    assert caught.value.setting == "model.weights"
    message = str(caught.value)
    assert "missing: first.bias;" in message
    assert "unknown: extra0, extra1, extra2, extra3, extra4 and 2 more;" in message
    assert "other shape: head.weight [5, 3] for [5, 12]" in message
    assert_same_bits(model.state_dict(), make_model(0).state_dict())


def test_unreadable_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.safetensors").write_text("no weights")
    for name, message in (
        ("nowhere", "cannot be found"),
        ("empty", r"has no \*\.safetensors"),
        ("text.safetensors", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_weights(make_model(), tmp_path / name)


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path / "weights", state()) / "model.safetensors"
    os.truncate(file, file.stat().st_size - 10)
    with pytest.raises(
        ConfigError, match=r"model\.safetensors cannot be read.*copy or download it"
    ):
        load_weights(make_model(), tmp_path / "weights")


INDEX = "model.safetensors.index.json"


def indexed(directory: Path, weights: dict[str, Tensor]) -> dict[str, str]:
    """Save two files and their index; return where each tensor is."""
    first, *others = weights
    saved(directory, {first: weights[first]}, "model-00001-of-00002.safetensors")
    saved(directory, {name: weights[name] for name in others}, "model-00002-of-00002.safetensors")
    places = {
        name: f"model-0000{1 if name == first else 2}-of-00002.safetensors" for name in weights
    }
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


def test_index_selects_files(tmp_path: Path) -> None:
    directory = tmp_path / "weights"
    indexed(directory, state())
    # Left over from another model, and after the others in alphabetical order.
    saved(directory, state(4), "model-00003-of-00003.safetensors")
    model = make_model(0)
    load_weights(model, directory)
    assert_same_bits(model.state_dict(), state())
    # As in transformers, a single file comes before the index.
    saved(directory, state(5))
    load_weights(model, directory)
    assert_same_bits(model.state_dict(), state(5))


def test_files_with_same_tensor_need_index(tmp_path: Path) -> None:
    directory = tmp_path / "weights"
    indexed(directory, state())
    saved(directory, state(4), "model-00003-of-00003.safetensors")
    (directory / INDEX).unlink()
    model = make_model(0)
    with pytest.raises(ConfigError, match=rf"of-00003.* both have .*, or add its {INDEX}$"):
        load_weights(model, directory)
    assert_same_bits(model.state_dict(), make_model(0).state_dict())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{broken", "cannot be read: Expecting property name"),
        ("[1, 2]", "has no 'weight_map'"),
        ("{}", "has no 'weight_map'"),
        ('{"weight_map": {}}', "has no 'weight_map'"),
        (
            {"first.bias": "gone.safetensors"},
            "names files that are not in the directory: gone.safetensors",
        ),
        (
            {"first.bias": "../x.safetensors"},
            "names files that are not in the directory: ../x.safetensors",
        ),
        ({"first.bias": 3}, "names files that are not in the directory: 3"),
        (
            {"first.bias": "model-00001-of-00002.safetensors"},
            "places in model-00001-of-00002.safetensors what it lacks: first.bias",
        ),
    ],
)
def test_index_that_contradicts_directory_is_refused(
    tmp_path: Path, content: str | dict[str, str], message: str
) -> None:
    directory = tmp_path / "weights"
    places = indexed(directory, state())
    saved(tmp_path, state(), "x.safetensors")
    text = content if isinstance(content, str) else json.dumps({"weight_map": places | content})
    (directory / INDEX).write_text(text)
    model = make_model(0)
    with pytest.raises(ConfigError) as caught:
        load_weights(model, directory)
    assert f"{directory / INDEX} {message}" in str(caught.value)
    assert str(caught.value).endswith("save or download the directory again")
    assert_same_bits(model.state_dict(), make_model(0).state_dict())


def exported(directory: Path, config: TransformerConfig = SMALL) -> Transformer:
    model = Transformer(config)
    state = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    write(directory, EngineWeights(state, keep=True), described(model), torch.float32)
    return model


def test_transformer_is_rebuilt_from_directory(tmp_path: Path) -> None:
    model = exported(tmp_path / "weights")
    found = load_model(tmp_path / "weights")
    assert isinstance(found, Transformer)
    assert found.config == SMALL
    tokens = torch.arange(6)[None]
    assert torch.equal(found(tokens), model(tokens))


def test_settings_without_effect_on_shapes_are_compared(tmp_path: Path) -> None:
    exported(tmp_path / "weights")
    values = vars(SMALL) | {"heads": 4, "rotary_base": 500.0, "sequence_length": 16}
    for path in (tmp_path / "weights", tmp_path / "weights" / "model.safetensors"):
        with pytest.raises(
            ConfigError, match=r"heads = 2 for 4; rotary_base = 10000\.0 for 500\.0"
        ):
            load_weights(Transformer(TransformerConfig(**values)), path)
    load_weights(Transformer(TransformerConfig(**(values | vars(SMALL)))), tmp_path / "weights")


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (None, "cannot be read"),
        ([], "has no 'model_type'"),
        ({"layers": 1}, "has no 'model_type'"),
        ({"model_type": "llama"}, "a model of type 'llama'"),
        # Users who trust such a directory import the model themselves; distmp runs no code from it.
        (
            {"model_type": "distmp-import-path", "name": "os:system", "options": {"command": "x"}},
            "a model of type 'distmp-import-path'",
        ),
        ({"model_type": "distmp-transformer", "layers": 1}, "cannot be built"),
        ({"model_type": "distmp-transformer", **vars(SMALL), "hidden": "x"}, "cannot be built"),
    ],
)
def test_directories_of_other_models_are_refused(
    tmp_path: Path, described: object, message: str
) -> None:
    saved(tmp_path / "weights", state())
    if described is not None:
        (tmp_path / "weights" / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path / "weights")


@pytest.mark.parametrize("elements", [[], [3], [2, 2, 2, 2], [9, 1, 1, 9, 4, 5, 1], [5, 9, 5, 9]])
def test_files_are_divided_as_hugging_face_divides_them(elements: list[int]) -> None:
    hub = pytest.importorskip("huggingface_hub")
    specs = {f"{i}": torch.empty(n, device="meta") for i, n in enumerate(elements)}
    for size in (4, 20, 24, 28, 100):
        expected = hub.split_torch_state_dict_into_shards(specs, max_shard_size=size)
        assert divided(specs, size) == expected.filename_to_tensors


def test_replaced_weights_are_kept_until_new_ones_have_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stored() -> list[float]:
        return [load_file(path)["a"].item() for path in sorted(tmp_path.rglob("*.safetensors"))]

    def export(value: float) -> None:
        weights = EngineWeights({"model/a": torch.tensor(value)}, keep=True)
        write(tmp_path / "weights", weights, None, torch.float32)

    export(1.0)
    with monkeypatch.context() as patch:  # NFS keeps files that are open
        patch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
        export(2.0)
        assert stored() == [1.0, 2.0]
        with pytest.raises(CheckpointError, match="not empty"):
            export(3.0)
    export(4.0)
    assert stored() == [4.0]


@pytest.mark.parametrize("replaces", [False, True])
def test_one_of_two_exports_to_a_directory_succeeds(tmp_path: Path, replaces: bool) -> None:
    begun, ended = threading.Event(), threading.Event()

    def export(weights: type[EngineWeights], value: float) -> None:
        state = {"model/a": torch.tensor(value)}
        write(tmp_path / "weights", weights(state, keep=True), None, torch.float32)

    class Second(EngineWeights):
        def read(self, name: str) -> Tensor | None:
            begun.set()
            assert ended.wait(60)
            return super().read(name)

    with ThreadPoolExecutor() as pool:

        class First(EngineWeights):
            def read(self, name: str) -> Tensor | None:
                pool.submit(export, Second, 2.0)
                assert begun.wait(60)
                return super().read(name)

        if replaces:
            export(EngineWeights, 0.0)
        try:
            with pytest.raises(CheckpointError, match="another process has begun to write it"):
                export(First, 1.0)
        finally:
            ended.set()
    assert load_file(tmp_path / "weights" / "model.safetensors")["a"] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_only_unfinished_directories_of_the_same_name_are_removed(tmp_path: Path) -> None:
    others = {".weights.20261130.0123abcd.writing", ".weights.20261130.replaced"}
    for name in (*others, ".weights.0123abcd.writing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    exported(tmp_path / "weights")
    assert {path.name for path in tmp_path.iterdir()} == {*others, "weights"}


def test_files_are_on_disk_before_the_directory_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    rename = Path.rename

    def renamed(path: Path, target: Path) -> Path:
        events.append("renamed")
        return rename(path, target)

    def written(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)

    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(os, "fsync", written)
    exported(tmp_path / "weights")
    assert sorted(events[:2]) == ["config.json", "model.safetensors"]
    assert fnmatch(events[2], ".weights.*.writing")
    assert events[3:] == ["renamed", tmp_path.name]


def test_symbolic_link_to_weights_is_kept(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "weights").symlink_to("disk")
    for value in (1.0, 2.0):
        weights = EngineWeights({"model/a": torch.tensor(value)}, keep=True)
        write(tmp_path / "weights", weights, None, torch.float32)
        assert load_file(tmp_path / "disk" / "model.safetensors")["a"] == value
    assert (tmp_path / "weights").is_symlink()
    assert len([*tmp_path.iterdir()]) == 2


def test_tensors_in_file_are_aligned(tmp_path: Path) -> None:
    tensors = {
        "mask": torch.tensor([True, False, True]),
        "half": torch.arange(3, dtype=torch.bfloat16),
        "wide": torch.arange(5, dtype=torch.float64),
        "weight": torch.randn(3, 7),
    }
    for names in (["mask"], ["mask", "half", "wide", "weight"]):
        file = tmp_path / f"{len(names)}.safetensors"
        specs = in_file_order({name: tensors[name] for name in names})
        write_file(file, specs, (tensors[name] for name in specs))
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        for name in names:
            assert (start + header[name]["data_offsets"][0]) % tensors[name].itemsize == 0, name
        assert start % 8 == 0
        assert_same_bits(load_file(file), {name: tensors[name] for name in names})
