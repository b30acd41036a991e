"""Sequences packed from several documents, compared with the documents one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from distmp.data import IGNORED
from distmp.data.documents import PackedDocuments
from distmp.engine import Engine
from distmp.errors import ConfigError
from distmp.models import documents as documents_module
from distmp.models import transformer
from distmp.models.documents import attend, block_mask, document_mask
from distmp.models.loss import next_token_loss
from distmp.models.transformer import RotaryScaling, Transformer, TransformerConfig
from distmp.utils.fake_tensors import FakeTensors
from distmp.utils.live_bytes import LiveBytes
from tests.ranks import ranks
from tests.reference import weights

END = 30
LENGTHS = ((5, 1, 9, 8), (12, 11))  # of two rows


def model(**options: object) -> Transformer:
    torch.manual_seed(0)
    config = TransformerConfig(31, 23, 2, 16, 4, 20, **options)  # type: ignore[arg-type]
    made = Transformer(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))  # attention is far from uniform
    return made


def documents(row: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(row)
    made = [torch.randint(30, (length,), generator=generator) for length in LENGTHS[row]]
    for document in made:
        document[-1] = END
    return made


def batch() -> dict[str, Tensor]:
    """Return two rows of one sample each; the last document of a row is cut."""
    samples = []
    for row in range(2):
        tokens = torch.cat(documents(row))
        sample = {"inputs": tokens, "targets": torch.cat((tokens[1:], torch.tensor([7])))}
        samples.append(PackedDocuments([sample], END)[0])
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied_head": False, "key_value_heads": 2, "qk_norm": True},
        {"rotary_scaling": RotaryScaling(4.0, 1.0, 4.0, 8), "key_value_heads": 1},
    ],
    ids=["plain", "grouped queries", "rotary scaling"],
)
def test_packed_documents_have_the_logits_loss_and_gradients_of_single_ones(
    options: dict[str, object],
) -> None:
    packed, single = model(**options), model(**options)
    made = batch()
    logits = packed(made["inputs"], positions=made["positions"])
    loss, weight = next_token_loss(packed, made)
    loss.backward()
    total, count = torch.zeros(()), 0.0
    for row in range(2):
        alone = [single(document[None])[0] for document in documents(row)]
        torch.testing.assert_close(logits[row], torch.cat(alone), rtol=1e-4, atol=1e-5)
        for document in documents(row):
            # Without a target for the last token: the next document is another one.
            pair = {"inputs": document[None, :-1], "targets": document[None, 1:]}
            if len(document) > 1:
                part, number = next_token_loss(single, pair)
                total, count = total + part, count + float(number)
    total.backward()
    torch.testing.assert_close(loss, total, rtol=1e-5, atol=0)
    assert weight == count
    for found, expected in zip(packed.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-5)


def test_the_rotation_restarts_in_each_document() -> None:
    """Attention depends on differences of positions only, so its result does not show this."""
    ours, made = model(), batch()
    seen: list[Tensor] = []
    ours.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    ours(made["inputs"], positions=made["positions"])
    assert torch.equal((seen[0] == 1).all(-1)[..., 0], made["positions"] == 0)


def test_a_token_changes_nothing_in_other_documents() -> None:
    made, changed = batch(), batch()
    changed["inputs"][0, 2] += 1  # in the first document
    changed["inputs"][0, 8] += 1  # in the third one
    ours = model()
    before = ours(made["inputs"], positions=made["positions"])
    after = ours(changed["inputs"], positions=made["positions"])
    different = (before != after).any(-1)
    expected = torch.zeros(2, 23, dtype=torch.bool)
    expected[0, 2:5] = expected[0, 8:15] = True
    assert torch.equal(different, expected)
    without = (ours(made["inputs"]) != ours(changed["inputs"])).any(-1)
    assert without[0, 2:].all()  # without positions, it does


def test_targets_of_another_document_are_ignored() -> None:
    made = batch()
    ends = made["inputs"] == END
    assert (made["targets"][ends] == IGNORED).all()
    assert (made["targets"][~ends] != IGNORED).all()


def test_flex_attention_has_the_same_mask() -> None:
    """Only forward, and not compiled: that needs a GPU."""
    from torch.nn.attention.flex_attention import flex_attention

    positions = batch()["positions"]
    query, key = (torch.randn(2, heads, 23, 16) for heads in (4, 2))
    expected = attend(query, key, key, document_mask(positions, query))
    with torch.no_grad():
        mask = block_mask((positions == 0).cumsum(1))
        found = flex_attention(query, key, key, block_mask=mask, enable_gqa=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of a result."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *(leaf.numel() for leaf in leaves), 0)
        return result


@pytest.mark.parametrize("time", [23, 128, 300, 1024])
@pytest.mark.parametrize("frequency", [0.0, 0.003, 0.01, 0.1, 1.0])
def test_blocks_are_those_of_the_whole_matrix(time: int, frequency: float) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    begins = torch.rand(3, time, generator=torch.Generator().manual_seed(time)) < frequency
    begins[1, ::128] = True  # documents that end with their block
    begins[2, :1] = True
    numbers = begins.cumsum(1)

    def attends(batch: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (numbers[batch, query] == numbers[batch, key]) & (query >= key)

    expected = create_block_mask(attends, 3, None, time, time, device="cpu")
    with LargestTensor() as largest:
        found = block_mask(numbers)
    assert torch.equal(found.to_dense(), expected.to_dense())
    assert found.shape == expected.shape
    for name in ("kv_num_blocks", "full_kv_num_blocks", "kv_indices", "full_kv_indices"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert largest.elements < max(time * time, 6 * time)  # at 23 tokens, one block of 128


def test_activations_on_a_fake_gpu_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """`FakeTensors` keeps positions real, and FlexAttention cannot run on fake tensors."""
    made = batch()
    with FakeTensors(), LiveBytes() as live:
        ours = model()
        live.start()
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "is_cuda", True)
            logits = ours(made["inputs"], positions=made["positions"])
        logits.sum().backward()
    assert logits.shape == (2, 23, 31)
    assert sum(live.peak.values()) > logits.nbytes


def test_flex_attention_never_runs_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "document_mask", lambda p, _: block_mask((p == 0).cumsum(1)))
    with (
        torch.compiler.set_stance("force_eager"),
        LargestTensor() as largest,
        pytest.raises(ConfigError, match=r"needs torch\.compile"),
    ):
        next_token_loss(model(), batch())
    assert 0 < largest.elements <= 2 * 128 * 23  # no scores, which are [2, 4, 128, 128]
    compiled = torch.compile(documents_module._compiled_attention, backend="eager")
    monkeypatch.setattr(documents_module, "_flex_attention", lambda: compiled)
    with torch.no_grad():
        loss, _ = next_token_loss(model(), batch())
    monkeypatch.undo()
    torch.testing.assert_close(loss, next_token_loss(model(), batch())[0])


@pytest.mark.gpu
@pytest.mark.real_gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flex_attention_on_a_gpu_agrees_with_the_mask() -> None:
    torch.manual_seed(0)
    config = TransformerConfig(31, 256, 2, 128, 4, 64, key_value_heads=2)
    ours = Transformer(config)
    tokens = torch.randint(31, (2, 256))
    sample = [PackedDocuments([{"inputs": row, "targets": row}], END)[0] for row in tokens]
    made = {name: torch.stack([one[name] for one in sample]) for name in sample[0]}
    gradients = []
    for device in ("cpu", "cuda"):
        ours.to(device).zero_grad()
        loss, _ = next_token_loss(ours, {name: value.to(device) for name, value in made.items()})
        loss.backward()
        gradients.append([loss.detach().cpu(), *(p.grad.cpu() for p in ours.parameters())])  # type: ignore[union-attr]
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


def test_positions_for_a_model_that_does_not_take_them_are_refused() -> None:
    class Without(torch.nn.Module):
        pass

    with pytest.raises(ConfigError, match="Without does not take the positions of tokens"):
        next_token_loss(Without(), batch())


def trained(strategy: str, policy: str) -> dict[str, Tensor]:
    def adamw(named: object) -> torch.optim.Optimizer:
        return torch.optim.AdamW(named, lr=1e-2)  # type: ignore[arg-type]

    engine = Engine(model(), next_token_loss, adamw, policy=policy, strategy=strategy)
    engine.step([batch()])
    return weights(engine)


@ranks(2)
def test_sharded_blocks_take_the_mask() -> None:
    expected = trained("ddp", "fp32")
    for name, value in trained("fsdp", "fp32").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)
