from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from distmp.errors import ConfigError
from distmp.optim import Muon
from distmp.optim.factories import optimizer_factory
from distmp.optim.muon import is_hidden, orthogonalized
from distmp.optim.settings import OptimizerConfig
from tests.ranks import ranks

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SHAPES = [(24, 40), (40, 24), (16, 16), (1, 9)]


def matrices(seed: int = 0) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (f"layer{index}.weight", torch.randn(shape, generator=generator).requires_grad_())
        for index, shape in enumerate(SHAPES)
    ]


def set_gradients(named: list[tuple[str, Tensor]], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for _, tensor in named:
        tensor.grad = torch.randn(tensor.shape, generator=generator)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_updates_agree_with_torch_muon(adjust: str) -> None:
    options: dict[str, Any] = {"lr": 0.02, "adjust_lr_fn": adjust}
    ours, theirs, exact = matrices(), matrices(), matrices()
    optimizer = Muon(ours, ns_dtype="bf16", **options)
    reference = torch.optim.Muon([tensor for _, tensor in theirs], **options)
    in_fp32 = Muon(exact, **options)
    starts = [tensor.detach().clone() for _, tensor in ours]
    for step in range(3):
        for named in (ours, theirs, exact):
            set_gradients(named, step)
        optimizer.step()
        reference.step()
        in_fp32.step()
    for (_, own), (_, other), (_, fp32), start in zip(ours, theirs, exact, starts, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-6)
        # FP32 iterations differ from torch's by the rounding of bfloat16 only.
        assert (fp32 - other).norm() < 0.03 * (other - start).norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_iterations_agree_with_float64_and_orthogonalize(
    shape: tuple[int, int],
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact = orthogonalized(matrix)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    scaled = values / values.norm()
    a, b, c = COEFFICIENTS
    for _ in range(5):  # the polynomial acts on singular values
        scaled = a * scaled + b * scaled**3 + c * scaled**5
    torch.testing.assert_close(exact, left @ scaled.diag() @ right)
    assert scaled.min() > 0.3
    assert scaled.max() < 1.3
    error = (orthogonalized(matrix.float()) - exact).norm() / exact.norm()
    assert error < 1e-5
    for scale in (1e20, 3e38 / float(matrix.abs().max())):  # squares, or the norm, beyond FP32
        found = orthogonalized(matrix.float() * scale)
        assert (found - exact).norm() / exact.norm() < 1e-5
    assert orthogonalized(torch.zeros(shape)).abs().sum() == 0


def layers() -> nn.ModuleDict:
    torch.manual_seed(5)
    return nn.ModuleDict(
        {
            "embed_tokens": nn.Embedding(11, 8),
            "up": nn.Linear(8, 12),
            "conv": nn.Conv1d(3, 2, 2),
            "norm": nn.LayerNorm(8),
            "lm_head": nn.Linear(8, 11),
        }
    )


def test_adamw_updates_all_except_hidden_matrices() -> None:
    ours, theirs = layers(), layers()
    config = OptimizerConfig("muon", lr=0.01, weight_decay=0.3, options={"betas": [0.8, 0.9]})
    optimizer = optimizer_factory(config)(list(ours.named_parameters()))
    (hidden,) = [group for group in optimizer.param_groups if group["muon"]]
    assert hidden["param_names"] == ["up.weight"]
    assert isinstance(optimizer, Muon)
    assert optimizer.describe() == (
        "Muon updates 1 matrices, AdamW 8 other tensors, including the matrices "
        "embed_tokens.weight, lm_head.weight"
    )
    others = [(n, p) for n, p in theirs.named_parameters() if n != "up.weight"]
    decayed = [(n, p) for n, p in others if p.dim() > 1]
    plain = [(n, p) for n, p in others if p.dim() <= 1]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.8, 0.9),
        fused=True,
    )
    for step in range(3):
        for module in (ours, theirs):
            set_gradients(list(module.named_parameters()), step)
        optimizer.step()
        reference.step()
    for (name, own), (_, other) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert torch.equal(own, other) is (name != "up.weight"), name


def test_adamw_updates_matrices_without_elements() -> None:
    empty = torch.zeros(0, 4, requires_grad=True)
    empty.grad = torch.zeros(0, 4)
    optimizer = Muon([("up.weight", empty)])
    optimizer.step()
    assert optimizer.matrices == []


def test_rates_and_weight_decay_apply_per_rule() -> None:
    named = list(layers().named_parameters())
    optimizer = Muon(named, lr=0.5, weight_decay=0.2, adamw=["*up*"], adamw_lr=0.1)
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    assert rates == {
        name: 0.5 if name in ("embed_tokens.weight", "lm_head.weight") else 0.1 for name, _ in named
    }
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.2}
    explicit = Muon([{"params": named[:1], "muon": True}, {"params": named[1:], "muon": False}])
    assert [tensor is named[0][1] for tensor in explicit.matrices] == [True]


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "transformer.wte.weight",
        "tok_emb.weight",
        "lm_head.weight",
        "heads.head.weight",
        "heads.0.weight",
        "head.2.weight",
        "mtp.layers.0.shared_head.head.weight",
        "classifier.6.weight",
        "shared.weight",
        "output.weight",
        "lm.output.weight",
        "to_logits.weight",
        "fc_out.weight",
        "cls.predictions.decoder.weight",
    ],
)
def test_embeddings_and_heads_are_not_hidden(name: str) -> None:
    assert not is_hidden(name, torch.zeros(2, 2))


@pytest.mark.parametrize(
    "name",
    [
        "multihead_attn.in_proj_weight",
        "blocks.0.multi_head_attention.q.weight",
        "blocks.0.sa.heads.3.key.weight",
        "blocks.0.attention.output.dense.weight",
        "layers.0.attention.output.weight",
        "transformer.h.0.mlp.fc_out.weight",
        "decoder.layers.0.self_attn.q_proj.weight",
        "decoder.0.weight",
        "layers.0.ahead.weight",
        "attention.score_proj.weight",
    ],
)
def test_matrices_with_names_resembling_heads_are_hidden(name: str) -> None:
    assert is_hidden(name, torch.zeros(2, 2))
    assert not is_hidden(name, torch.zeros(2, 2, 2))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copy_takes_the_same_steps(copied: Callable[[Muon], Muon]) -> None:
    optimizer = Muon(layers().named_parameters(), adamw_lr=0.1, ns_dtype="bf16")
    for step in range(2):
        other = copied(optimizer)
        tensors = []
        for each in (optimizer, other):
            tensors.append([tensor for group in each.param_groups for tensor in group["params"]])
            set_gradients([("", tensor) for tensor in tensors[-1]], step)
            each.step()
        assert all(torch.equal(own, copy) for own, copy in zip(*tensors, strict=True))
    other.add_param_group({"params": [("up.weight", torch.zeros(2, 2))]})
    assert len(other.matrices) == 2


def test_skipped_step_changes_no_bit() -> None:
    named = matrices()
    optimizer = Muon(named, lr=0.02)
    optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    set_gradients(named, 0)
    optimizer.step()
    momentum = [optimizer.state[tensor]["momentum_buffer"] for _, tensor in named]
    momentum[0][0, 0] = -0.0
    tensors = [*(tensor for _, tensor in named), *momentum]
    before = [tensor.detach().clone().view(torch.int32) for tensor in tensors]
    optimizer.found_inf.fill_(1.0)  # type: ignore[attr-defined]
    for _, tensor in named:
        tensor.grad = torch.full_like(tensor, torch.nan)
    optimizer.step()
    after = [tensor.detach().view(torch.int32) for tensor in tensors]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_muon_divides_gradients_by_scale() -> None:
    scaled, plain = matrices(), matrices()
    optimizer, reference = Muon(scaled, lr=0.02), Muon(plain, lr=torch.tensor(0.02))  # type: ignore[arg-type]
    optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    for step, scale in enumerate((4.0, 0.5, 64.0)):
        optimizer.grad_scale.fill_(scale)  # type: ignore[attr-defined]
        set_gradients(scaled, step)
        set_gradients(plain, step)
        for _, tensor in scaled:
            tensor.grad *= scale  # type: ignore[operator]
        optimizer.step()
        reference.step()
    for (_, one), (_, other) in zip(scaled, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_adamw_divides_gradients_by_scale() -> None:
    scaled, plain = (list(layers().named_parameters()) for _ in range(2))
    # Of a size at which an update depends on that of the gradient.
    optimizer, reference = (Muon(named, lr=0.02) for named in (scaled, plain))
    for group in (*optimizer.param_groups, *reference.param_groups):
        group["eps"] = 1.0
    optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    for named in (scaled, plain):
        set_gradients(named, 0)
    for _, tensor in scaled:
        tensor.grad *= 4  # type: ignore[operator]
    optimizer.step()
    reference.step()
    for (name, one), (_, other) in zip(scaled, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7, msg=name)


def test_steps_after_overflow_need_no_scaler() -> None:
    module = layers()
    optimizer = Muon(module.named_parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for value in (torch.inf, 1.0):
        before = [tensor.detach().clone() for tensor in module.parameters()]
        scaler.scale(torch.ones(()))  # creates the scale
        for tensor in module.parameters():
            tensor.grad = torch.full_like(tensor, value)
        if value == torch.inf:
            scaler.step(optimizer)
        else:
            optimizer.step()
        moved = [
            not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True)
        ]
        assert moved == [value == 1.0] * len(moved)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, r"optim\.options\.momentum = 1\.0"),
        ({"adjust_lr_fn": "orginal"}, r"adjust_lr_fn = 'orginal': did you mean 'original'"),
        ({"ns_dtype": "fp16"}, r"ns_dtype = 'fp16'.*"),
        ({"adamw": "*head*"}, r"optim\.options\.adamw = '\*head\*': use a list of patterns"),
        ({"betas": (2.0, 0.9)}, r"optim\.options = .*refused by muon: "),
    ],
)
def test_invalid_muon_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        optimizer_factory(OptimizerConfig("muon", options=options))(matrices())


def test_unnamed_tensors_and_vectors_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs the names of its tensors"):
        Muon([torch.zeros(2, 2)])
    with pytest.raises(ConfigError, match=r"'bias' has the shape \(3,\)"):
        Muon([{"params": [("bias", torch.zeros(3))], "muon": True}])


@ranks(2)
def test_flat_shards_of_fsdp1_are_refused() -> None:
    for use_orig_params in (True, False):
        model = FullyShardedDataParallel(
            nn.Linear(8, 8), device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )
        named = [*model.named_parameters()]
        with pytest.raises(ConfigError, match=r"is managed by FSDP1.*use FSDP2 \(fully_shard\)"):
            Muon(named)
        assert not Muon([{"params": named, "muon": False}]).matrices


def test_groups_added_later_are_divided() -> None:
    named = list(layers().named_parameters())
    at_once, later = Muon(named, lr=0.02), Muon(named[:1], lr=0.02)
    later.add_param_group({"params": named[1:], "weight_decay": 0.0})
    assert later.describe() == at_once.describe()
    assert {id(one) for one in later.matrices} == {id(one) for one in at_once.matrices}
    assert [group["weight_decay"] for group in later.param_groups] == [0.1, 0.0, 0.0]
    set_gradients(named, 0)
    later.step()
    with pytest.raises(ConfigError, match="needs the names of its tensors"):
        later.add_param_group({"params": [torch.zeros(2, 2)]})


def test_torch_state_round_trips() -> None:
    first, second = matrices(), matrices()
    optimizer, other = Muon(first, lr=0.02), Muon(second, lr=0.02)
    set_gradients(first, 0)
    optimizer.step()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for (_, one), (_, two) in zip(first, second, strict=True):
        two.data.copy_(one.data)
    for step in (1, 2):
        set_gradients(first, step)
        set_gradients(second, step)
        optimizer.step()
        other.step()
    assert all(torch.equal(one, two) for (_, one), (_, two) in zip(first, second, strict=True))


@pytest.mark.parametrize("fused", [True, False])
def test_state_of_another_memory_format_can_be_loaded(fused: bool) -> None:
    start = torch.randn(4, 3, 5, 6)
    first = start.clone().requires_grad_()
    second = start.to(memory_format=torch.channels_last).requires_grad_()
    optimizer, other = (Muon([("conv", one)], lr=0.02, fused=fused) for one in (first, second))

    def step(optimizer: Muon, tensor: Tensor) -> None:
        optimizer.zero_grad()
        (tensor**3).sum().backward()
        optimizer.step()

    step(optimizer, first)
    second.data.copy_(first.data)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(3):
        step(optimizer, first)
        step(other, second)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-6)
