from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from distmp.errors import ConfigError, TrainingError
from distmp.precision import PRESETS, PrecisionPolicy, policy
from distmp.precision.builders import (
    autocast_context,
    cast_inputs_and_outputs,
    fsdp1_policy,
    fsdp2_policy,
    prepare,
)
from distmp.precision.keep import (
    cast_buffers,
    keep_in_fp32,
    kept_modules,
    modules_in_fp32,
    run_in_fp32,
    storage_dtypes,
)
from tests.ranks import ranks
from tests.reference import loss, make_model, samples

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")
SIXTEEN_BITS = [
    name
    for name, preset in PRESETS.items()
    if preset.compute_dtype != FP32 and not preset.has_low_precision_matmuls
]


class LlamaRMSNorm(nn.LayerNorm):
    """A norm that only its class identifies."""


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln = LlamaRMSNorm(8)
        self.router = nn.Linear(8, 2)
        self.attention = nn.Linear(8, 8)
        self.softmax = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.ln(x)) * self.softmax(self.router(x))[..., :1]


class Model(nn.Module):
    """A model with all kinds of modules that are kept in FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.blocks = nn.ModuleList(Mixer() for _ in range(2))
        self.batch_norm = nn.BatchNorm1d(8)
        self.lm_head = nn.Linear(8, 5)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.batch_norm(x))


BLOCKS = ("blocks.0", "blocks.1")


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ((), []),
        (("norm",), ["blocks.0.ln", "blocks.1.ln", "batch_norm"]),
        (("softmax",), ["blocks.0.softmax", "blocks.1.softmax"]),
        (("router",), ["blocks.0.router", "blocks.1.router"]),
        (("head",), ["lm_head"]),
        (("loss",), ["criterion"]),
        (("LayerNorm", "head"), None),  # no module has that class by name
        (("LlamaRMSNorm",), ["blocks.0.ln", "blocks.1.ln"]),
        (("*Norm*",), ["blocks.0.ln", "blocks.1.ln", "batch_norm"]),
        (
            ("blocks.0.*",),
            [f"blocks.0.{part}" for part in ("ln", "router", "attention", "softmax")],
        ),
        (("*.attention",), ["blocks.0.attention", "blocks.1.attention"]),
        (("blocks",), [*BLOCKS]),  # a list is never called
        (("Mixer", "norm"), [*BLOCKS, "batch_norm"]),  # the outermost modules only
        (("lm_head", "head"), ["lm_head"]),
    ],
)
def test_patterns(patterns: tuple[str, ...], expected: list[str] | None) -> None:
    if expected is None:
        with pytest.raises(ConfigError):
            kept_modules(Model(), patterns)
    else:
        model = Model()
        found = kept_modules(model, patterns)
        assert list(found) == expected
        assert all(model.get_submodule(name) is part for name, part in found.items())


class Uncalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ParameterList([nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize(
    ("model", "pattern", "message"),
    [
        (Model(), "nrom", r"'nrom': matches no module of the model; did you mean 'norm'\?"),
        (Model(), "lm_haed", r"did you mean 'lm_head'\?"),
        (
            Model(),
            "qqq",
            "write a name such as 'criterion', or a class; words that match: head, loss, norm",
        ),
        (nn.Sequential(nn.Linear(1, 1)), "nothere", "write a name such as '0', or a class$"),
        (Model(), "Model", "keeps the whole model; use the policy fp32"),
        (nn.Linear(1, 1), "norm", "the model has no parts"),
        (nn.Sequential(nn.Linear(1, 1)), "head", "head': matches no module of the model; write a"),
        (
            nn.Sequential(nn.Linear(1, 1)),
            "softmax",
            r"for the function of torch, write 'softmax\(\)'",
        ),
        (Uncalled(), "tables", r"'tables' \(ParameterList\) holds parameters but is never called"),
    ],
)
def test_patterns_without_match_are_refused(model: nn.Module, pattern: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        kept_modules(model, (pattern,))
    assert str(caught.value).startswith("precision.policy.keep_fp32 = ")


def test_modules_sharing_parameters_with_kept_one_are_kept() -> None:
    model = Model()
    model.lm_head.weight = model.embedding.weight
    assert list(kept_modules(model, ("head",))) == ["embedding", "lm_head"]
    own = PrecisionPolicy("own", compute_dtype=BF16, keep_fp32=("head",))
    assert storage_dtypes(model, own)["embedding.weight"] == FP32
    prepare(model, own, "cpu")
    weight = model.embedding.weight
    inside = Dtypes(model)
    with inside:
        model(torch.tensor([0, 3])).sum().backward()
    assert inside.found["lm_head", "aten.addmm"] == {FP32}
    assert inside.found["blocks.0.attention", "aten.addmm"] == {BF16}
    assert weight is model.lm_head.weight
    assert weight.grad is not None
    assert weight.grad.dtype == FP32


@pytest.mark.parametrize("name", ["bf16", "bf16-autocast"])
def test_attention_whose_projection_is_kept_is_kept(name: str) -> None:
    """It uses the weights of the projection without calling it."""
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 8), 2, enable_nested_tensor=False
    )
    own = policy(f"{name},keep_fp32=layers.1.*.out_proj")
    assert list(kept_modules(model, own.keep_fp32)) == ["layers.1.self_attn"]
    prepare(model, own, "cpu")
    inside = Dtypes(model)
    with inside, autocast_context(own, CPU):
        model(torch.ones(1, 2, 8))
    assert inside.found["layers.0.self_attn", "aten.addmm"] == {BF16}
    assert inside.found["layers.1.self_attn", "aten.addmm"] == {FP32}
    with pytest.raises(ConfigError, match="'out_proj': keeps the whole model"):
        kept_modules(nn.MultiheadAttention(8, 2), ["out_proj"])
    attention = nn.MultiheadAttention(8, 2)
    attention.query_norm = nn.LayerNorm(8)  # of a subclass, which calls it
    assert list(kept_modules(nn.Sequential(attention), ["norm"])) == ["0.query_norm"]


def test_kept_module_sharing_with_root_is_refused() -> None:
    model = Model()
    model.register_parameter("table", model.lm_head.weight)
    with pytest.raises(ConfigError, match="shares its parameter with 'table' of the outermost"):
        kept_modules(model, ("head",))


class Dtypes(TorchDispatchMode):
    """Records the floating-point dtypes of the inputs of each operation, by module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: dict[tuple[str, str], set[torch.dtype]] = {}
        self._inside: list[str] = []
        for name, part in model.named_modules():
            part.register_forward_pre_hook(functools.partial(self._enter, name))
            part.register_forward_hook(self._leave)

    def _enter(self, name: str, *_: Any) -> None:
        self._inside.append(name)

    def _leave(self, *_: Any) -> None:
        self._inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside:
            given = {x.dtype for x in args if isinstance(x, Tensor) and x.is_floating_point()}
            key = self._inside[-1], str(func.overloadpacket)
            self.found[key] = self.found.get(key, set()) | given
        return func(*args, **(kwargs or {}))


OPERATIONS = {
    "blocks.0.ln": "aten.native_layer_norm",
    "blocks.1.router": "aten.addmm",
    "blocks.1.softmax": "aten._softmax",
    "batch_norm": "aten.native_batch_norm",
    "lm_head": "aten.addmm",
}


@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_only_kept_modules_compute_in_fp32(name: str) -> None:
    own = policy(f"{name},keep_fp32=norm|softmax|router|head")
    model = Model()
    prepare(model, own, "cpu")
    seen = Dtypes(model)
    with seen, autocast_context(own, CPU):
        output = model(torch.tensor([1, 2, 3]))
    for part, operation in OPERATIONS.items():
        assert seen.found[part, operation] == {FP32}, part
    assert seen.found["blocks.0.attention", "aten.addmm"] == {own.compute_dtype}
    assert output.dtype == FP32
    assert not torch.equal(output, output.to(own.compute_dtype).float())  # not rounded to 16 bits
    output.sum().backward()
    assert {
        key: parameter.grad.dtype
        for key, parameter in model.named_parameters()
        if parameter.grad is not None
    } == storage_dtypes(model, own)


@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_modules_outside_patterns_are_not_kept(name: str) -> None:
    model = Model()
    prepare(model, policy(name), "cpu")
    seen = Dtypes(model)
    with seen, autocast_context(policy(name), CPU):
        model(torch.tensor([1, 2, 3]))
    assert seen.found["lm_head", "aten.addmm"] == {policy(name).compute_dtype}
    assert seen.found["blocks.1.router", "aten.addmm"] == {policy(name).compute_dtype}
    if policy(name).casts_parameters:  # autocast has its own list
        assert seen.found["blocks.0.ln", "aten.native_layer_norm"] == {policy(name).compute_dtype}


@pytest.mark.parametrize(("name", "around"), [("bf16", BF16), ("bf16-autocast", FP32)])
def test_output_dtype_of_kept_module(name: str, around: torch.dtype) -> None:
    """With 16-bit parameters the next layer needs 16 bits; after a head there is none."""
    own = policy(f"{name},keep_fp32=norm|head")
    model = Model()
    prepare(model, own, "cpu")
    with autocast_context(own, CPU):
        assert model.blocks[0].ln(torch.ones(1, 8)).dtype == around
        assert model.lm_head(torch.ones(1, 8, dtype=BF16)).dtype == FP32


class Arguments(nn.Module):
    def forward(self, x: Tensor, *, k: int, more: dict[str, Tensor]) -> dict[str, Any]:
        if k < 0:
            raise ValueError("negative")
        self.autocast = torch.is_autocast_enabled("cpu")
        self.seen = x.dtype, more["a"].dtype, more["index"].dtype
        return {"x": x, "k": k, "index": more["index"]}


@pytest.mark.parametrize("returned", [BF16, None])
def test_kept_module_casts_arguments_of_any_kind(returned: torch.dtype | None) -> None:
    module = Arguments()
    run_in_fp32(module, "cpu", returned)
    more = {"a": torch.ones(1, dtype=FP16), "index": torch.tensor([1])}
    with torch.autocast("cpu", dtype=BF16):
        output = module(torch.ones(1, dtype=BF16), k=2, more=more)
        assert torch.is_autocast_enabled("cpu")
        with pytest.raises(ValueError, match="negative"):
            module(torch.ones(1), k=-1, more=more)
        assert torch.is_autocast_enabled("cpu")
    assert module.seen == (FP32, FP32, torch.int64)
    assert not module.autocast
    assert output["x"].dtype == (returned or FP32)
    assert (output["k"], output["index"].dtype) == (2, torch.int64)


def kept_linear() -> nn.Linear:
    linear = nn.Linear(4, 4)
    run_in_fp32(linear, "cpu", BF16)
    return linear


@pytest.fixture
def reference() -> tuple[nn.Linear, Tensor, Tensor]:
    linear = kept_linear()
    x = torch.randn(3, 4, dtype=BF16)
    return linear, x, F.linear(x.float(), linear.weight, linear.bias).to(BF16)


def test_copied_kept_module_uses_own_parameters(
    reference: tuple[nn.Linear, Tensor, Tensor],
) -> None:
    linear, x, expected = reference
    copied = copy.deepcopy(linear)
    with torch.no_grad():
        linear.weight.zero_()
    torch.testing.assert_close(copied(x), expected, rtol=0, atol=0)


def test_copy_of_module_that_was_kept_twice_uses_own_parameters(
    reference: tuple[nn.Linear, Tensor, Tensor],
) -> None:
    linear, x, expected = reference
    run_in_fp32(linear, "cpu")
    copied = copy.deepcopy(linear)
    with torch.no_grad():
        linear.weight.zero_()
    torch.testing.assert_close(copied(x), expected, rtol=0, atol=0)


def test_kept_modules_work_compiled_and_checkpointed(
    reference: tuple[nn.Linear, Tensor, Tensor],
) -> None:
    linear, x, expected = reference
    whole = torch.compile(linear, backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(x), expected, rtol=0, atol=0)
    with torch.autocast("cpu", dtype=BF16):
        output = checkpoint(linear, x.clone().requires_grad_(), use_reentrant=False)
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
    output.float().sum().backward()
    torch.testing.assert_close(linear.weight.grad, x.float().sum(0).expand(4, 4))


class Writes(nn.Module):
    """Modules that write to an argument, whose return value is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)
        self.router = AddsInPlace()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        self.router(hidden, more={"x": x})
        self.relu(hidden)
        return hidden


class AddsInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, more: dict[str, Tensor]) -> None:
        hidden[:, :4] *= 2
        hidden.add_(self.inner(more["x"]))


@pytest.mark.parametrize("context", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["bf16", "bf16-autocast"])
def test_writes_of_kept_modules_to_arguments_reach_caller(
    name: str, context: Callable[[], Any]
) -> None:
    model, x = Writes(), torch.randn(16, 8).to(BF16)
    exact = copy.deepcopy(model).double()
    own = policy(f"{name},keep_fp32=relu|router")
    prepare(model, own, "cpu")
    with context(), autocast_context(own, CPU):
        output = model(x)
        expected = exact(x.double())
    torch.testing.assert_close(output.double(), expected, rtol=2e-2, atol=2e-2)
    if expected.requires_grad:
        output.square().sum().backward()
        expected.square().sum().backward()
        for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            assert ours.grad is not None
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=2e-2, atol=0.5)


def test_used_output_of_kept_in_place_module_is_right() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    plain, x = copy.deepcopy(model), torch.randn(4, 8)
    own = policy("bf16-autocast,keep_fp32=ReLU")
    prepare(model, own, "cpu")
    for part in (model, plain):
        with autocast_context(own, CPU):
            part(x).float().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


class Leaf(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            x.mul_(2)
        return x * y.unsqueeze_(0)


def test_kept_module_may_write_to_a_leaf_and_view_its_arguments() -> None:
    module, plain = Leaf(), Leaf()
    found = []
    run_in_fp32(module, "cpu")
    for part in (module, plain):
        x, y = torch.full((4,), 3.0, dtype=BF16, requires_grad=True), torch.ones(4, dtype=BF16)
        output = part(x, y)
        output.float().sum().backward()
        assert x.grad is not None
        found.append([*output.flatten().tolist(), *x.tolist(), *x.grad.tolist()])
    assert found[0] == found[1]


def test_kept_module_without_prepared_root_is_not_pickled() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    keep_in_fp32(model, policy("bf16-autocast,keep_fp32=norm"), "cpu")
    with pytest.raises(TrainingError, match="cannot be pickled"):
        torch.save(model, io.BytesIO())
    assert type(copy.deepcopy(model)[1]) is nn.LayerNorm


@pytest.mark.parametrize("model", [nn.LazyLinear(4), nn.LSTM(4, 4, 2)])
def test_lazy_and_flattened_weights_are_converted(model: nn.Module) -> None:
    prepare(model, policy("bf16"), "cpu")
    assert {each.dtype for each in model.parameters()} == {BF16}


def test_arguments_that_kept_module_only_reads_are_not_written() -> None:
    linear, x = kept_linear(), torch.randn(4, dtype=BF16).expand(3, 4)
    version = x._version
    with torch.inference_mode():
        linear(x)
    linear(x)
    assert x._version == version


def test_model_prepared_without_engine_can_be_saved_as_message_says() -> None:
    model = nn.Linear(2, 2)
    prepare(model, policy("bf16"), "cpu")
    with pytest.raises(TrainingError, match=r"; save its state_dict\(\), or with distmp"):
        torch.save(model, io.BytesIO())
    torch.save(model.state_dict(), io.BytesIO())


def test_forward_replaced_by_other_tool_is_called() -> None:
    linear = nn.Linear(2, 2)
    linear.forward = lambda x: (x, torch.is_autocast_enabled("cpu"))  # type: ignore[method-assign]
    run_in_fp32(linear, "cpu")
    with torch.autocast("cpu", dtype=BF16):
        output, autocast = linear(torch.ones(1, dtype=BF16))
    assert (output.dtype, autocast) == (FP32, False)


def test_encoder_layer_fast_path_is_disabled() -> None:
    """It would pass FP32 and 16-bit weights to one kernel."""
    layer = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True))
    prepare(layer, policy("bf16,keep_fp32=norm"), "cpu")
    with torch.no_grad():
        assert layer.eval()(torch.ones(1, 2, 8)).dtype == FP32


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.ones(4))
        self.register_buffer("index", torch.arange(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x + self.table[self.index].to(x.dtype)))


@pytest.mark.parametrize(
    ("text", "table", "statistics"),
    [
        ("fp32", FP32, FP32),
        ("bf16", FP32, FP32),
        ("bf16-autocast", FP32, FP32),
        ("bf16,buffer=fp32", FP32, FP32),
        ("bf16,buffer=bf16", BF16, BF16),
        ("bf16,buffer=bf16,keep_fp32=norm", BF16, FP32),
        ("fp16", FP32, FP32),
        ("fp16,buffer=fp16", FP16, FP16),
    ],
)
def test_buffers_have_dtype_of_policy(
    text: str, table: torch.dtype, statistics: torch.dtype
) -> None:
    model = Tables()
    prepare(model, policy(text), "cpu")
    found = {name: buffer.dtype for name, buffer in model.named_buffers()}
    assert found["table"] == table
    assert found["norm.running_mean"] == found["norm.running_var"] == statistics
    assert found["index"] == found["norm.num_batches_tracked"] == torch.int64
    assert storage_dtypes(model, policy(text))["norm.weight"] == (
        FP32 if statistics == FP32 else policy(text).module_dtype
    )
    for training in (True, False):
        model.train(training)
        with autocast_context(policy(text), CPU):
            model(torch.randn(5, 4)).sum().backward()


@pytest.mark.parametrize(
    ("text", "expected"), [("bf16", ["0", "1"]), ("bf16-autocast", []), ("bf16,buffer=bf16", [])]
)
def test_layers_with_statistics_are_kept_among_16_bit_parameters(
    text: str, expected: list[str]
) -> None:
    orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
    model = nn.Sequential(nn.BatchNorm1d(4), orthogonal, nn.Linear(4, 4))
    assert [*modules_in_fp32(model, policy(text))] == expected


def test_16_bit_buffers_of_kept_modules_become_fp32() -> None:
    model = Tables().to(BF16)
    cast_buffers(model, policy("bf16"))
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.dtype == FP32
    assert model.table.dtype == BF16


def test_kept_batch_norm_statistics_agree_with_fp32() -> None:
    plain, kept = nn.Sequential(nn.BatchNorm1d(4)), nn.Sequential(nn.BatchNorm1d(4))
    prepare(kept, policy("bf16"), "cpu")
    for step in range(20):
        torch.manual_seed(step)
        x = (3 + torch.randn(16, 4)).to(BF16)
        plain(x.float())
        kept(x)
    for name in ("running_mean", "running_var"):
        assert torch.equal(getattr(plain[0], name), getattr(kept[0], name))


def test_fp32_policies_wrap_no_module() -> None:
    assert keep_in_fp32(Model(), policy("fp32"), "cpu") == {}


@pytest.mark.parametrize(("text", "dtype"), [("bf16-autocast", FP16), ("bf16", BF16)])
def test_frozen_parameters_keep_dtype_among_fp32(text: str, dtype: torch.dtype) -> None:
    model = Model()
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.half()
    kept = policy(f"{text},keep_fp32=norm")
    assert storage_dtypes(model, kept)["blocks.0.attention.weight"] == dtype
    assert storage_dtypes(model, kept)["blocks.0.ln.weight"] == FP32


def test_integer_parameters_keep_dtype() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    counter = nn.Parameter(torch.tensor(1), requires_grad=False)
    model[0].register_parameter("counter", counter)
    assert storage_dtypes(model, policy("bf16"))["0.counter"] == torch.int64


Shard = Callable[[nn.Module, dict[str, nn.Module], PrecisionPolicy], nn.Module]


def fsdp2(model: nn.Module, kept: dict[str, nn.Module], own: PrecisionPolicy) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for part in kept.values():
        fully_shard(part, mp_policy=fsdp2_policy(policy("fp32")))
    return fully_shard(model, mp_policy=fsdp2_policy(own))


def fsdp1(model: nn.Module, kept: dict[str, nn.Module], own: PrecisionPolicy) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    def wrap(part: nn.Module, chosen: PrecisionPolicy) -> nn.Module:
        return FullyShardedDataParallel(
            part, mixed_precision=fsdp1_policy(chosen), use_orig_params=True, device_id=CPU
        )

    for name, part in kept.items():
        model.set_submodule(name, wrap(part, policy("fp32")))
    return wrap(model, own)


def observed_loss(text: str, shard: Shard) -> float:
    """Run a forward and backward; check the types inside a kept and another module."""
    own, model, seen = policy(text), make_model(), {}
    for name in ("blocks.0.norm", "blocks.0.linear"):
        part = model.get_submodule(name)

        def noted(x: Tensor, name: str = name, part: nn.Module = part) -> Tensor:
            seen[name] = next(part.parameters()).dtype, x.dtype
            output: Tensor = type(part).forward(part, x)
            return output

        vars(part)["forward"] = noted
    kept = keep_in_fp32(model, own, "cpu")
    cast_inputs_and_outputs(model, own)
    module = shard(model, kept, own)
    with autocast_context(own, CPU):
        total, _ = loss(module, samples(0, 8))
    total.backward()
    # Autocast casts inside the linear layer, for any input dtype.
    assert seen["blocks.0.norm"] == (FP32, FP32)
    assert seen["blocks.0.linear"] == (own.module_dtype, own.module_dtype)
    assert {p.grad.dtype for p in module.parameters() if p.grad is not None} == {FP32}
    return total.item()


@ranks(2)
def test_kept_modules_work_inside_fsdp() -> None:
    for text in ("bf16,keep_fp32=norm|head", "fp16,keep_fp32=norm", "bf16-autocast,keep_fp32=norm"):
        own, whole = policy(text), make_model()
        prepare(whole, own, "cpu")
        with autocast_context(own, CPU):
            expected = loss(whole, samples(0, 8))[0].item()
        for shard in (fsdp1, fsdp2):
            assert observed_loss(text, shard) == pytest.approx(expected, rel=1e-6)
