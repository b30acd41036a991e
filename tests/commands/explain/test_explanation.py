"""Predictions agree with what real runs allocate, send and compute."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.growth import peak_allocated, sent_bytes, stepper
from distmp import cli
from distmp.buckets import gradients
from distmp.commands.explain import explanation as explanation_module
from distmp.commands.explain.explanation import Explanation, explain, predict
from distmp.commands.explain.fake_ranks import FakeRanks, simulate_ranks
from distmp.commands.explain.observe import differences
from distmp.commands.explain.report import report, seen
from distmp.commands.explain.trace_steps import trace_steps
from distmp.config import RunConfig
from distmp.distributed import collectives
from distmp.distributed.world import World
from distmp.errors import ConfigError, SetupError
from distmp.optim import owners
from distmp.parallel.reproducible import CUBLAS_VARIABLE, CUBLAS_WORKSPACES
from distmp.precision import resolve
from distmp.training.components import build_model_and_data
from distmp.utils.live_bytes import GRADIENTS, MASTERS, OPTIMIZER_STATE, PARAMETERS, PARTIAL_SUMS
from distmp.utils.units import bytes_text
from tests.commands.explain.runs import CPU, SMALL, policy, run
from tests.marks import nightly
from tests.ranks import run_ranks

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))
MOMENTUM = {"name": "sgd", "options": {"momentum": 0.9}}
ONE_RANK = {
    "bf16-autocast": run(precision=policy("bf16-autocast")),
    # One layer more: the kernels of the loss convert 16-bit factors in memory of their own.
    "bf16-pure, kept": run(
        precision=policy("bf16-pure,keep_fp32=norm"), model={"options": {"layers": 3}}
    ),
    "dropping": run(precision={"policy": "bf16", "on_nonfinite": "drop_microbatch"}),
    "recomputed": run(precision=policy("bf16"), activation_checkpointing="blocks"),
    "reproducible": run(
        precision=policy("fp32"), reproducible=True, batch={"global_batch_size": 64}
    ),
    "sgd": run(precision=policy("fp32"), optim=MOMENTUM),
}
TWO_RANKS = {
    "ddp": run(precision=policy("bf16,reduce=bf16"), strategy="ddp"),
    "shard_optimizer": run(precision=policy("bf16"), strategy="ddp", shard_optimizer=True),
    "fsdp": run(precision=policy("bf16,keep_fp32=norm"), strategy="fsdp"),
    "fsdp, sharded": run(
        precision=policy("bf16,reduce=bf16"),
        strategy="fsdp",
        sharding={"accumulate": "sharded"},
        batch={"global_batch_size": 80},  # five microbatches: more than are run to predict them
    ),
    "fsdp, 8 bits": run(precision=policy("fp8"), strategy="fsdp"),
    "fsdp, muon": run(precision=policy("bf16"), strategy="fsdp", optim={"name": "muon"}),
}


# Internal memory of gloo and of kernels is not predicted, nor are the headers that gloo sends.
LIMIT = 0.05


def predicted(config: RunConfig, ranks: int) -> Any:
    return predict(config, resolve(config.precision.policy, CPU)[0], ranks, CPU)


# The collectives that sum gradients over ranks, on CPUs and on GPUs. Gloo has no reduce-scatter.
# With 16 bits and with `reproducible`, distmp exchanges the gradients and sums them itself.
SUMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "ddp": ({"strategy": "ddp"}, "all-reduce", "all-reduce"),
    "shard_optimizer": (
        {"strategy": "ddp", "shard_optimizer": True},
        "all-to-all",
        "reduce-scatter",
    ),
    "fsdp": ({"strategy": "fsdp"}, "all-to-all", "reduce-scatter"),
}


def sums_of_gradients(name: str, wire: str, device: torch.device) -> set[str]:
    """Return the collectives of gradients that are predicted for two ranks."""
    settings = dict(SUMS[name][0])
    if wire == "reproducible":
        settings["reproducible"] = True
    text = "bf16,reduce=bf16" if wire == "reduce=bf16" else "bf16"
    found = predict(run(precision=policy(text), **settings), resolve(text, CPU)[0], 2, device)
    return {entry.kind for entry in found.communication if entry.purpose == "gradients"}


def collectives_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the ranks of this machine use the collectives of ranks with GPUs."""
    for module in (gradients, collectives):
        monkeypatch.setattr(module, "has_native_reduce_scatter", lambda device: True)


def expected_sums(name: str, wire: str, *, native: bool) -> set[str]:
    if wire:
        return {"all-to-all", "all-gather"} if name == "ddp" else {"all-to-all"}
    return {SUMS[name][2 if native else 1]}


WIRES = [
    (name, wire)
    for name in SUMS
    for wire in ("", "reduce=bf16", "reproducible")
    if not (wire == "reproducible" and name.startswith("fsdp"))  # refused
]


@pytest.mark.parametrize("native", [nightly(False), True])
@pytest.mark.parametrize(
    ("name", "wire"), [case if case == ("fsdp", "") else nightly(*case) for case in WIRES]
)
def test_table_names_collectives_of_device(
    name: str, wire: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native:
        collectives_of_a_gpu(monkeypatch)
    assert sums_of_gradients(name, wire, CPU) == expected_sums(name, wire, native=native)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "wire"), [case if case in WIRES[::3] else nightly(*case) for case in WIRES]
)
def test_table_names_collectives_of_gpu(name: str, wire: str) -> None:
    found = sums_of_gradients(name, wire, torch.device("cuda", 0))
    assert found == expected_sums(name, wire, native=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [name if name in ("dropping", "fsdp") else nightly(name) for name in (*ONE_RANK, *TWO_RANKS)],
)
def test_gpu_prediction_agrees_with_cpu(name: str) -> None:
    """Activations and temporary memory depend on kernels, and collectives on the backend."""
    config, ranks = (ONE_RANK[name], 1) if name in ONE_RANK else (TWO_RANKS[name], 2)
    expected = predicted(config, ranks)
    chosen, _ = resolve(config.precision.policy, CPU)
    found = predict(config, chosen, ranks, torch.device("cuda", 0))
    for part in (PARAMETERS, MASTERS, OPTIMIZER_STATE, GRADIENTS, PARTIAL_SUMS):
        assert found.memory.get(part) == expected.memory.get(part), part
    assert [replace(entry, kind="") for entry in found.communication] == [
        replace(entry, kind="") for entry in expected.communication
    ]


def test_data_assignment_moves_fake_parameters() -> None:
    """`.data =` moves a fake parameter to the device of the run, even if this machine has none."""

    def on_cuda(tensor: Any) -> Any:
        with tensor.fake_mode:
            return tensor.to("cuda:0")

    with simulate_ranks(1):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        tied = model[1].weight = model[0].weight
        model._apply(on_cuda)
        assert model[0].weight is model[1].weight is tied
        for parameter in model.parameters():
            assert parameter.device == torch.device("cuda", 0)
            assert parameter.requires_grad
        with torch.no_grad():  # backward needs a build of torch for this device
            assert model(on_cuda(torch.ones(2, 4))).device.type == "cuda"


def test_reproducible_gpu_run_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CUBLAS_VARIABLE, raising=False)
    with simulate_ranks(1):
        assert os.environ[CUBLAS_VARIABLE] in CUBLAS_WORKSPACES
    assert CUBLAS_VARIABLE not in os.environ, "it would hide a mistake from the next engine"
    monkeypatch.setenv(CUBLAS_VARIABLE, ":0:0")
    with simulate_ranks(1):
        assert os.environ[CUBLAS_VARIABLE] == ":0:0", "the run refuses it"


def test_pinned_memory_is_simulated() -> None:
    with simulate_ranks(1):
        assert torch.ones(3).pin_memory().shape == (3,)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ONE_RANK)
def test_memory_of_one_rank_agrees_with_run(name: str) -> None:
    config = ONE_RANK[name]
    deterministic = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    try:
        measured = peak_allocated(stepper(config))
        found = predicted(config, 1)
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fills
    assert found.memory_bytes == pytest.approx(measured, rel=LIMIT)
    assert found.communication == []


@pytest.mark.parametrize(
    ("settings", "ranks", "state"),
    [
        ({"optim": {"options": {"fused": False}}}, 1, 8),
        nightly({"strategy": "fsdp", "optim": MOMENTUM}, 2, 2),
        ({"strategy": "ddp", "shard_optimizer": True, "optim": {"name": "adagrad"}}, 2, 2),
    ],
)
def test_optimizers_that_skip_on_host_are_stepped(
    settings: dict[str, Any], ranks: int, state: float
) -> None:
    found = predicted(run(precision=policy("bf16"), **settings), ranks)
    assert found.memory[OPTIMIZER_STATE] == pytest.approx(state * found.parameters, rel=0.01)
    assert found.differences == []


def test_exchange_of_muon_is_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, all_to_all = [], owners.all_to_all

    def counted(*arguments: Any) -> Any:
        _, _, _, _, (_kept, *sizes) = arguments
        sent.append(sum(sizes))
        return all_to_all(*arguments)

    monkeypatch.setattr(owners, "all_to_all", counted)
    optim = {"name": "muon", "options": {"ns_dtype": "bf16"}}
    batch = {"microbatch_size": 1}
    found = predicted(run(precision=policy("bf16"), strategy="fsdp", optim=optim, batch=batch), 16)
    (exchange,) = (entry for entry in found.communication if entry.purpose == "optimizer")
    # Rank 0 owns the most expensive matrix; two steps were traced.
    assert (exchange.dtype, exchange.nbytes) == (torch.bfloat16, 2 * sum(sent) / 2)
    assert found.differences == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("settings", "ranks", "share"),
    [
        nightly({"strategy": "single"}, 1, 1),
        ({"strategy": "ddp"}, 4, 1),
        nightly({"strategy": "ddp", "shard_optimizer": True}, 4, 4),
        nightly({"strategy": "fsdp"}, 4, 4),
    ],
)
def test_average_takes_4_bytes_per_parameter(
    settings: dict[str, Any], ranks: int, share: int
) -> None:
    plain, averaged = (
        predicted(run(**settings, batch={"microbatch_size": 4}, **more), ranks)
        for more in ({}, {"ema": {"decay": 0.9}})
    )
    added = averaged.memory["average of the weights"]
    assert added == pytest.approx(4 * averaged.parameters / share, rel=0.01)
    assert averaged.memory_bytes - plain.memory_bytes == added


def measured_on_two_ranks() -> dict[str, tuple[int, int, float]]:
    """Return by name the peak memory of a step and of the start, and the bytes that are sent."""
    found = {}
    for name, config in TWO_RANKS.items():
        step = stepper(config)
        for _ in range(2):
            step()
        sent = sent_bytes(step)
        # These are real tensors. The profiler, used for one rank, does not see memory that gloo's
        # threads free.
        world = World.current(CPU)
        chosen = resolve(config.precision.policy, CPU)[0]
        trace = trace_steps(config, build_model_and_data(config, world), world, chosen, steps=3)
        found[name] = sum(trace.peak.values()), trace.start_peak, sent
    return found


@pytest.mark.nightly
def test_two_rank_memory_and_traffic_agree_with_run() -> None:
    measured = run_ranks(measured_on_two_ranks, 2, timeout=110.0)[0]
    for name, config in TWO_RANKS.items():
        found = predicted(config, 2)
        peak, start, sent = measured[name]
        assert found.memory_bytes == pytest.approx(peak, rel=LIMIT), name
        assert found.start_memory_bytes == pytest.approx(start, rel=LIMIT), name
        assert found.communication_bytes == pytest.approx(sent, rel=LIMIT), name


def between(config: RunConfig) -> dict[str, tuple[int, int]]:
    """Return bytes inside a machine and between machines, for 4 machines of 4 ranks."""
    found = predict(config, resolve(config.precision.policy, CPU)[0], 16, CPU, 4)
    return {
        f"{entry.purpose}: {entry.kind}": (
            entry.nbytes - entry.between_machines,
            entry.between_machines,
        )
        for entry in found.communication
    }


@pytest.mark.nightly
def test_hsdp_gathers_within_and_reduces_between_machines() -> None:
    settings: dict[str, Any] = {
        "precision": policy("bf16"),
        "batch": {"global_batch_size": 16, "microbatch_size": 1},
    }
    hybrid = between(run(strategy="hsdp", **settings))
    assert hybrid["parameters: all-gather"][1] == 0 < hybrid["parameters: all-gather"][0]
    assert hybrid["gradients: all-to-all"][1] == 0 < hybrid["gradients: all-to-all"][0]
    assert hybrid["gradients: all-reduce"][0] == 0 < hybrid["gradients: all-reduce"][1]
    flat = between(run(strategy="fsdp", **settings))
    # First inside of each machine, then a quarter of it with the other machines.
    inside, outside = flat["gradients: all-to-all"]
    assert outside == pytest.approx(inside / 4, rel=1e-6)
    inside, outside = flat["parameters: all-gather"]
    assert outside == pytest.approx(inside / 3, rel=1e-6)


def test_operations_of_a_layer_do_not_grow_with_ranks() -> None:
    dispatch, counts = FakeRanks.__torch_dispatch__, Counter[tuple[int, int]]()

    def counted(self: Any, func: Any, *args: Any) -> Any:
        counts[layers, ranks] += 1
        return dispatch(self, func, *args)

    for layers, ranks in itertools.product((1, 2), (16, 64)):
        with mock.patch.object(FakeRanks, "__torch_dispatch__", counted):
            batch = {"global_batch_size": ranks, "microbatch_size": 1}
            model = {"options": {"layers": layers}}
            config = run(precision=policy("bf16"), strategy="fsdp", batch=batch, model=model)
            predicted(config, ranks)
    # What ranks compare at the start grows with them, whatever the number of layers.
    one_layer, two_layers = (counts[layers, 64] - counts[layers, 16] for layers in (1, 2))
    assert two_layers == one_layer


@pytest.mark.nightly
def test_startup_never_holds_whole_model() -> None:
    """The largest weight and its random values are an eighth of this model."""
    config = run(
        strategy="fsdp",
        precision=policy("bf16"),
        model={"options": {"layers": 16}},
        batch={"global_batch_size": 64, "microbatch_size": 1},
    )
    found = predicted(config, 64)
    assert found.start_memory_bytes < 4 * found.parameters / 3


@pytest.mark.nightly
def test_explain_handles_70b_on_4096_ranks() -> None:
    """With the width of 70 B parameters, whose 80 equal blocks would only take more time."""
    sizes = {"layers": 2, "dimension": 8192, "heads": 64, "key_value_heads": 8, "hidden": 28672}
    config = run(
        strategy="fsdp",
        precision=policy("bf16"),
        model={"size": "70b", "options": sizes},
        data={"path": None},  # the standard library has samples for all ranks
        batch={"global_batch_size": 4096, "microbatch_size": 1},
    )
    found = predict(config, resolve("bf16", CPU)[0], 4096, CPU, 8)
    block = [(10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672), (8192, 1), (8192, 1)]
    shapes = [*block, *block, (257, 8192), (257, 8192), (8192, 1)]
    assert found.parameters == sum(rows * columns for rows, columns in shapes)
    # FSDP pads each parameter to the same number of rows on every rank.
    shard = sum(-(-rows // 4096) * columns for rows, columns in shapes)
    assert found.memory[PARAMETERS] == 4 * shard
    (gradients,) = (entry for entry in found.communication if entry.purpose == "gradients")
    assert gradients.nbytes - gradients.between_machines == 4 * shard * 512 * 7
    assert gradients.between_machines == 4 * shard * 511
    largest = 57344 * 8192
    assert found.start_memory_bytes < 4 * (largest + sum(rows * columns for rows, columns in block))


@pytest.mark.nightly
def test_memory_of_masters_and_sums_by_rank_count() -> None:
    """Shards shrink with the ranks; reproducible sums grow with the logarithm of microbatches."""
    settings: dict[str, Any] = {"precision": policy("bf16"), "strategy": "ddp"}
    many = run(**settings, shard_optimizer=True, batch={"global_batch_size": 8 * 64})
    parameters = predicted(many, 64).parameters
    assert predicted(many, 64).memory[MASTERS] == pytest.approx(4 * parameters / 64, rel=0.02)
    for microbatches, sets in ((2, 1), (16, 4)):
        batch = {"global_batch_size": 16 * microbatches}
        memory = predicted(run(**settings, reproducible=True, batch=batch), 2).memory
        assert memory[PARTIAL_SUMS] == sets * memory[GRADIENTS]


@pytest.mark.parametrize("strategy", ["ddp", nightly("fsdp")])
def test_kept_module_of_one_block_has_its_own_row(strategy: str) -> None:
    kept = policy("bf16,keep_fp32=blocks.1.attention")
    found = explain(run(precision=kept, strategy=strategy, model={"options": {"layers": 3}}), 2)
    assert found.differences == []
    groups = {group.name: seen(found, group) for group in found.groups}
    assert groups["blocks.*.attention.output [1]"] == "fp32"
    assert groups["blocks.*.attention.output [0, 2]"] == "bf16"
    assert any("query_key_value [0, 2] " in line for line in report(found))


@pytest.mark.nightly
def test_observed_formats_agree_with_policy() -> None:
    for text in ("fp32", "bf16,keep_fp32=norm", "fp16-autocast"):
        found = explain(run(precision=policy(text)), 1)
        assert found.differences == []
        assert all(seen(found, group) for group in found.groups)


@pytest.mark.nightly
@pytest.mark.parametrize(("strategy", "text"), [("fsdp", "bf16-pure")])
def test_shards_are_not_reported_as_differences(strategy: str, text: str) -> None:
    found = explain(run(strategy=strategy, precision=policy(text)), 2)
    assert found.differences == []


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_frozen_weights_keep_their_dtype(strategy: str) -> None:
    config = run(precision=policy("bf16-autocast"), strategy=strategy)
    model = replace(RunConfig().model, name="tests.commands.explain.runs:frozen")
    found = explain(replace(config, model=model), 2)
    assert found.differences == []
    assert any(line.startswith("* [1] ") and " float64 " in line for line in report(found))
    # FSDP2 gathers weights of two dtypes as bytes.
    assert "agreement" not in {entry.purpose for entry in found.communication}


def test_difference_from_policy_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    model = {"name": "tests.commands.explain.runs:Stubborn"}
    config = replace(run(precision=policy("bf16")), model=replace(RunConfig().model, **model))
    (difference,) = explain(config, 1).differences[:1]
    assert difference == (
        "linear computes products in float32, but the policy bf16 specifies bfloat16"
    )


def test_indivisible_batch_is_refused_before_simulation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distmp.commands.explain.explanation.simulate_ranks", None)
    with pytest.raises(ConfigError, match=r"^batch\.global_batch_size = .* 999999999"):
        explain(run(), 999_999_999)


def test_data_is_read_without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data.dataloader._MultiProcessingDataLoaderIter", None)
    explain(run(data={"workers": 2}), 1)


class Loaded(nn.Linear):
    """Starts from weights in a file."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.load_state_dict(torch.load("loaded.pt")[0])


def loaded_samples(split: str, sequence_length: int) -> Any:
    return torch.load("loaded.pt")[1]


def squares(model: nn.Module, batch: Any) -> Any:
    return model(batch["x"]).square().sum(), len(batch["x"])


def test_samples_and_weights_are_loaded_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    samples = [{"x": torch.ones(4)} for _ in range(16)]
    torch.save((nn.Linear(4, 2).state_dict(), samples), "loaded.pt")
    model = {"name": f"{__name__}:Loaded", "loss": f"{__name__}:squares"}
    config = run(data={"source": f"{__name__}:loaded_samples", "path": None})
    config = replace(config, model=replace(RunConfig().model, **model))
    assert explain(config, 1).parameters == 10


def unvalidated(split: str, sequence_length: int) -> range | None:
    return range(100) if split == "train" else None


def test_data_that_a_run_refuses_is_refused() -> None:
    config = run(data={"source": f"{__name__}:unvalidated", "path": None})
    with pytest.raises(ConfigError, match=r"^batch\.global_batch_size = 200: is more than the 100"):
        explain(replace(config, batch=replace(config.batch, global_batch_size=200)), 1)


def test_value_dependent_model_is_refused() -> None:
    model = replace(RunConfig().model, name="tests.commands.explain.runs:Indecisive")
    lazy = replace(RunConfig().model, name="tests.commands.explain.runs:lazy")
    with pytest.raises(ConfigError, match="has no shape yet; give its layer all sizes"):
        explain(replace(run(precision=policy("fp32")), model=lazy), 1)
    with pytest.raises(ConfigError, match="cannot be traced without the values"):
        explain(replace(run(precision=policy("fp32")), model=model), 1)
    assert not dist.is_initialized()


@pytest.mark.nightly
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_explain_accepts_every_configuration(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if config.stem == "huggingface":
        pytest.importorskip("transformers")
    monkeypatch.chdir(config.parent.parent)
    # Short samples make it fast; nothing else changes.
    arguments = ["explain", "--config", str(config), "--data.sequence-length", "16"]
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert not [line for line in lines if "POLICY MISMATCH" in line]


def test_explain_accepts_samples_that_torch_draws(capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(__file__).parents[3] / "examples" / "image_classifier.yaml"
    assert cli.main(["explain", "--config", str(config), "--world-size", "2"]) == 0
    assert "total" in capsys.readouterr().out


OTHER_MACHINE = "the free memory is that of this machine; for another one, set strategy"


def small_file(directory: Path) -> str:
    (directory / "run.yaml").write_text(json.dumps(SMALL))
    return str(directory / "run.yaml")


@pytest.fixture
def _explained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every later command the explanation of the first one."""
    found: list[Explanation] = []

    def remembered(*arguments: Any) -> Explanation:
        found[:] = found or [explain(*arguments)]
        return found[0]

    monkeypatch.setattr(explanation_module, "explain", remembered)


@pytest.mark.usefixtures("_explained_once")
def test_json_agrees_with_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = small_file(tmp_path)
    options = ["--precision.policy", "bf16,reduce=bf16"]
    arguments = ["explain", "--config", file, "--world-size", "2", *options]
    assert cli.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert found["memory_bytes"] == sum(found["memory"].values())
    assert found["communication_bytes"] == sum(one["nbytes"] for one in found["communication"])
    assert f"{found['parameters']:,} parameters" in text
    assert sum(group["parameters"] for group in found["groups"]) == found["parameters"]
    for part, size in found["memory"].items():
        assert any(
            line.startswith(f"{part} ") and f"{size / found['parameters']:.2f}" in line
            for line in text.splitlines()
        )
    (warning,) = found["warnings"]
    text = " ".join(text.split())
    assert OTHER_MACHINE in text
    assert warning in text
    observed = found["observed"]["computed"]
    assert observed["blocks.*.attention.output"] == {"products": ["bfloat16"]}
    # torch converts the inputs of norms, which adds precision and is no mismatch.
    assert observed["norm"] == {"norms": ["float32"]}


@pytest.mark.usefixtures("_explained_once")
@pytest.mark.parametrize("strategy", ["ddp", nightly("fsdp")])
def test_table_contains_bytes_per_network_card(
    strategy: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collectives_of_a_gpu(monkeypatch)
    sizes = ["--world-size", "4", "--ranks-per-machine", "2", "--strategy", strategy]
    arguments = [
        "explain",
        "--config",
        small_file(tmp_path),
        "--batch.microbatch-size",
        "4",
        *sizes,
    ]
    assert cli.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert found["ranks_per_machine"] == 2
    assert not any(line.startswith(OTHER_MACHINE) for line in lines)
    sent = found["between_machines_bytes"]
    assert sent == sum(entry["between_machines"] for entry in found["communication"]) > 0
    assert any(line.endswith(f"each card sends {bytes_text(sent)}") for line in lines)
    assert any(
        line.startswith("at the start") and bytes_text(found["start_memory_bytes"]) in line
        for line in lines
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--world-size", "0"], "world_size = 0: use 1 to 1,000,000 ranks"),
        (["--world-size", "100000000000"], "world_size = 100000000000: use 1 to 1,000,000 ranks"),
        (["--world-size", "3"], "must be a multiple of"),
        (["--world-size", "4", "--ranks-per-machine", "3"], "does not divide the 4 ranks"),
        (["--ranks-per-machine", "0"], "ranks_per_machine = 0: use 1 to 1,000,000 ranks"),
        (["--world-size", "2", "--strategy", "single"], "is for one rank"),
        (["--data.path", "/nowhere"], "data.path"),
        (["--precision.policy", "bf61"], "did you mean"),
    ],
)
def test_invalid_input_is_one_message(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", "--config", small_file(tmp_path), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("distmp explain: ")
    assert captured.err.count("\n") == 1


def refused_on_a_rank() -> None:
    with pytest.raises(SetupError, match="do not start it with torchrun"):
        predicted(run(), 2)


def test_explain_under_launcher_is_refused() -> None:
    run_ranks(refused_on_a_rank, 1)


# Observed formats of low-precision matmuls.


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    wide = {"until_tokens": 1e9, "policy": "bf16"}
    precision = {**policy("fp8,hp=first1"), "phases": [wide]}
    config = run(precision=precision, strategy="fsdp")
    return explain(config, 2, 2)


@pytest.mark.nightly
def test_formats_of_real_step_match_policy(explanation: Explanation) -> None:
    assert explanation.differences == []
    groups = {group.name: seen(explanation, group) for group in explanation.groups}
    assert groups["blocks.*.feed_forward.down [1]"] == "e4m3 e5m2"
    assert groups["blocks.*.feed_forward.down [0]"] == "bf16"


def test_matmuls_with_other_formats_are_reported(explanation: Explanation) -> None:
    observed, groups, fp8 = explanation.observed, explanation.groups, explanation.policy
    wrong = {**observed.low_precision, "blocks.*.feed_forward.down [1]": {"e4m3"}}
    assert [*differences(replace(observed, low_precision=wrong), groups, fp8)] == [
        "blocks.*.feed_forward.down [1] has low-precision operands in e4m3, but the policy "
        f"{fp8.name} specifies e4m3 and e5m2"
    ]
    none = [*differences(replace(observed, low_precision={}), groups, fp8)]
    assert len(none) == 4
    assert "has low-precision operands in none" in none[0]


def test_report_names_low_precision_layers(explanation: Explanation) -> None:
    text = " ".join(" ".join(report(explanation)).split())
    assert "4 of 8 linear layers have low-precision matmuls" in text
    assert "; in the compute dtype: blocks.0.attention." in text
    assert "(hp=first1); the formats are those after the last of precision.phases" in text
