"""A steady step makes the host wait for nothing, and launches what the stored budget says.

These tests count on a fake CUDA device, see `tests/fake_cuda`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from distmp.engine.settings import PrecisionPhase
from tests.engine import launches
from tests.engine.launches import CASES, LAYERS, STRATEGIES, Counts, steady_steps
from tests.ranks import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.not_replayed,
    pytest.mark.skipif("FAKE_CUDA_DEVICES" not in os.environ, reason="needs fake CUDA devices"),
]

budget_of_this_torch = pytest.mark.skipif(
    launches.stored()["torch"] != launches.TORCH,
    reason=f"the budget holds for torch {launches.stored()['torch']}",
)

# Launches of `reproducible` in a step for each doubling of the number of ranks: a sum of the shards
# of a bucket, and three of statistics.
PER_LEVEL = 4
# FSDP2 gathers a block twice, and copies what it sends and receives.
FSDP = {
    "c10d::_allgather_base_": 2,
    "aten::_foreach_copy_": 2,
    "aten::split_with_sizes_copy": 2,
    "aten::_chunk_cat": 1,
    "c10d::_reduce_scatter_base_": 1,
}
# What a layer of four parameters adds to a step of one microbatch, beyond forward and backward.
ADDED_BY_A_LAYER: dict[str, dict[str, int]] = {
    "ddp": {},
    "ddp, sharded optimizer": {},
    "reproducible": {},
    "fsdp, reduced once": FSDP,
    "fsdp, every microbatch": FSDP,
    "hsdp": {**FSDP, "c10d::allreduce_": 1},
}
# FSDP2 casts the shards before it gathers them, and converts the gradients that it copies.
FSDP_IN_BF16 = {**FSDP, "aten::_foreach_copy_": 4}
ADDED_IN_BF16: dict[str, dict[str, int]] = {
    "ddp": {},
    "ddp, sharded optimizer": {},
    "reproducible": {},
    "fsdp, reduced once": FSDP_IN_BF16,
    "fsdp, every microbatch": FSDP_IN_BF16,
    "hsdp": {**FSDP_IN_BF16, "c10d::allreduce_": 1},
}


@pytest.fixture(autouse=True)
def restore_algorithms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("strategy", "policy"), CASES)
def test_step_needs_no_synchronization(strategy: str, policy: str) -> None:
    for counts in launches.measured(strategy, policy):
        # The numbers of the step before.
        assert dict(counts.waits) == {"event.synchronize": 1}
        assert (counts.reads, counts.pageable_copies) == (0, 0)


def test_changing_formats_needs_no_synchronization() -> None:
    (counts,) = steady_steps(
        1,
        strategy="ddp",
        policy="fp8",
        precision_phases=(PrecisionPhase(1e9, "fp8,forward=bf16"),),
    )
    # The numbers of the step before, and its number of tokens.
    assert dict(counts.waits) == {"event.synchronize": 2}
    assert (counts.reads, counts.pageable_copies) == (0, 0)


@budget_of_this_torch
@pytest.mark.parametrize(("strategy", "policy"), CASES)
def test_launches_equal_the_recorded_budget(strategy: str, policy: str) -> None:
    budget = launches.stored()["launches"][strategy][policy]
    for part, found in launches.parts(strategy, policy).items():
        check(f"{strategy}, {policy}: {part}", found, budget[part])


def check(name: str, found: Counter[str], allowed: dict[str, int]) -> None:
    """Fail with the difference between counts."""
    added, removed = found - Counter(allowed), Counter(allowed) - found
    if added or removed:
        pytest.fail(
            f"{name} has {found.total()} launches, and {sum(allowed.values())} in the budget: "
            f"{dict(added)} were added, {dict(removed)} removed; if they should be, run "
            f"{launches.COMMAND}",
            pytrace=False,
        )


def test_launches_beyond_the_budget_are_named() -> None:
    check("a step", Counter({"aten::mul": 2, "copy": 1}), {"aten::mul": 2, "copy": 1})
    message = r"has 4 launches, and 3 in .*\{'cast': 2\} were added, \{'copy': 1\} removed"
    with pytest.raises(pytest.fail.Exception, match=message):
        check("a step", Counter({"aten::mul": 2, "cast": 2}), {"aten::mul": 2, "copy": 1})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_launches_do_not_grow_with_ranks(strategy: str) -> None:
    options = {**STRATEGIES[strategy], "policy": "bf16"}
    few, more, many = (
        steady_steps(1, launches.FEW, ranks=ranks, **options) for ranks in (8, 64, 512)
    )
    growths = [grown(few, more), grown(more, many)]
    if strategy == "reproducible":
        # Three levels of a binary tree, and sums of few ranks are not divided into levels.
        assert all(step.total() <= 3 * PER_LEVEL + 1 for steps in growths for step in steps)
    else:
        assert growths == 2 * [2 * [Counter()]]


def grown(few: list[Counts], many: list[Counts]) -> list[Counter[str]]:
    """Return the additional launches of each step."""
    return [larger.launches - less.launches for less, larger in zip(few, many, strict=True)]


@budget_of_this_torch
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_launches_per_layer(strategy: str, policy: str) -> None:
    options = {**STRATEGIES[strategy], "policy": policy}
    growth = of_a_layer(lambda layers: steady_steps(1, layers=layers, **options)[0].launches)
    growth -= of_a_layer(lambda layers: in_plain_torch(layers, policy))
    expected = ADDED_BY_A_LAYER if policy == "fp32" else ADDED_IN_BF16
    assert dict(growth) == expected[strategy]


def of_a_layer(count: Callable[[int], Counter[str]]) -> Counter[str]:
    """Return what each layer adds to a count of launches by number of layers."""
    growth = count(2 * LAYERS) - count(LAYERS)
    assert {number % LAYERS for number in growth.values()} == {0}
    return Counter({name: number // LAYERS for name, number in growth.items()})


def in_plain_torch(layers: int, policy: str) -> Counter[str]:
    """Return the launches of a forward and backward in the compute dtype of a policy."""
    from tests.fake_cuda import device

    dtype = torch.bfloat16 if policy == "bf16" else torch.float32
    model = launches.Model(layers).to("cuda", dtype)
    batch = torch.ones(2, launches.WIDTH, device="cuda", dtype=dtype)
    device.take_counters()
    with launches.FakeCollectives():  # in a dispatch mode, autograd adds out of place
        launches.loss(model, batch)[0].backward()
    return device.take_counters().launches


@pytest.mark.parametrize("strategy", ["ddp", "fsdp, reduced once"])
@ranks(2, cuda=True)
def test_fake_rank_does_not_change_launches(strategy: str) -> None:
    options = {**STRATEGIES[strategy], "policy": "bf16"}
    real = launches.steady_step(launches.build(**options), 1)
    dist.destroy_process_group()
    (simulated,) = steady_steps(1, ranks=2, **options)
    assert real == simulated
