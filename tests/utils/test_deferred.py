from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import distmp
from distmp.errors import ConfigError
from distmp.parallel.materialize import initial_values, materialize
from distmp.utils.deferred import (
    SMALL_ELEMENTS,
    NotDeferrableError,
    build_deferred,
    build_whole,
    describe_initial_values,
    is_recorded,
    record_more,
    recording_of,
)
from distmp.utils.generators import generators_kept

CPU = torch.device("cpu")


class Initialized(nn.Module):
    """Sets the values of its submodules in its own constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=2)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self.initialize)
        self.layers[0].weight.data.normal_(0.0, 0.02)

    def initialize(self, part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            nn.init.xavier_normal_(part.weight)


class Inits(nn.Module):
    """Uses functions of torch.nn.init, some of which read values."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.tall, self.cut, self.sparse = (nn.Linear(7, 9) for _ in range(4))
        nn.init.orthogonal_(self.wide.weight, gain=2.0)
        nn.init.orthogonal_(self.tall.weight.T)
        nn.init.trunc_normal_(self.cut.weight, std=0.5, a=-0.1, b=0.1)
        nn.init.sparse_(self.sparse.weight, 0.5)
        nn.init.zeros_(self.sparse.bias)


class Expressions(nn.Module):
    """Creates values out of place, reads values, and has buffers of all sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(3, 5) * 0.02 + torch.arange(5))
        self.copied = nn.Parameter(torch.empty(4))
        with torch.no_grad():
            self.copied.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
            self.copied[1:3].mul_(torch.rand(2))
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 4)]
        self.bound = float(torch.rand(3).max())
        self.register_buffer("frequencies", 1.0 / 10_000 ** (torch.arange(0, 8, 2) / 8))
        self.register_buffer("positions", torch.arange(SMALL_ELEMENTS + 3).float().sqrt())


class Copies(nn.Module):
    """Copies layers, so that their initial values are equal."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.recurrent = nn.LSTM(3, 4)
        self.twin = copy.deepcopy(self.recurrent)


CONSTRUCTORS = [Initialized, Inits, Expressions, Copies]


def computed(module: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Return all parameters and buffers; those on the meta device are computed, in any order."""
    recording = recording_of(module, seed)
    names = list(recording.views)
    random.Random(5).shuffle(names)
    values = {name: recording.compute(name, CPU) for name in names}
    own = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    return {name: values[name] if tensor.is_meta else tensor for name, tensor in own}


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_values_agree_with_constructor(constructor: Callable[[], nn.Module]) -> None:
    whole, deferred = build_whole(constructor, 7), build_deferred(constructor, 7)
    values = computed(deferred)
    expected = dict([*whole.named_parameters(remove_duplicate=False), *whole.named_buffers()])
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(values[name], value), name
        assert values[name].stride() == value.stride(), name
    # Python values that the constructor has read are the same, too.
    assert vars(deferred).get("rates") == vars(whole).get("rates")
    assert vars(deferred).get("bound") == vars(whole).get("bound")


def test_other_seed_gives_other_values() -> None:
    first, second = (computed(build_deferred(Initialized, seed)) for seed in (1, 2))
    assert not torch.equal(first["layers.0.weight"], second["layers.0.weight"])
    assert torch.equal(first["layers.1.weight"], second["layers.1.weight"])  # ones


@pytest.mark.parametrize("build", [build_whole, build_deferred])
def test_equal_layers_get_different_values(build: Callable[..., nn.Module]) -> None:
    values = computed(build(lambda: nn.Sequential(*(nn.Linear(3, 4) for _ in range(3))), 0))
    weights = [values[f"{index}.weight"].flatten() for index in range(3)]
    assert torch.stack(weights).unique().numel() == 3 * 12


def test_frozen_parameters_stay_frozen() -> None:
    module = build_deferred(lambda: nn.Linear(3, 4).requires_grad_(False), 0)
    assert module.weight.is_meta
    assert not module.weight.requires_grad


def test_copies_are_equal_and_keep_ties() -> None:
    values = computed(build_deferred(Copies, 3))
    layers = "encoder.layers.{}.self_attn.in_proj_weight"
    assert torch.equal(values[layers.format(0)], values[layers.format(1)])
    tied = build_deferred(Initialized, 3)
    assert tied.head.weight is tied.embedding.weight
    assert len(list(tied.parameters())) == 7


def test_deferred_build_uses_no_memory_or_generator() -> None:
    state = torch.get_rng_state()
    module = build_deferred(lambda: nn.Linear(2**24, 2**24), 1)  # 1 PiB
    assert module.weight.is_meta
    assert module.weight.requires_grad
    assert is_recorded(module)
    constant = build_deferred(lambda: nn.LayerNorm(2**40), 1)  # 8 TiB
    assert constant.weight.is_meta
    assert constant.bias.is_meta
    small = build_deferred(Inits, 1)
    recording_of(small, 0).compute("wide.weight", CPU)
    assert torch.equal(torch.get_rng_state(), state)


class Drawing(nn.Linear):
    """Draws from all generators."""

    def reset_parameters(self) -> None:
        random.random(), np.random.rand()
        super().reset_parameters()


def test_materialization_does_not_change_generators() -> None:
    def drawing() -> nn.Module:
        return Drawing(3, 4)

    def reset() -> None:
        with torch.device("meta"), generators_kept():
            module = drawing()
        recording_of(module, 0).compute("weight", CPU)

    def next_numbers() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(()).item()

    with generators_kept():
        expected = next_numbers()
    for use in (lambda: build_whole(drawing, 0), lambda: build_deferred(drawing, 0), reset):
        use()
        with generators_kept():
            assert next_numbers() == expected


class DrawsOutsideOfTorch(nn.Module):
    """Draws from the global generators of Python and numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(torch.ones(3, 2).normal_() * random.random())
        self.drawn = nn.Parameter(torch.empty(4))
        with torch.no_grad():
            self.drawn.copy_(torch.from_numpy(np.random.randn(4)))


def test_other_generators_are_seeded_and_restored() -> None:
    random.seed(1)
    np.random.seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    first = computed(build_deferred(DrawsOutsideOfTorch, 7))
    whole = build_whole(DrawsOutsideOfTorch, 7)
    assert states == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    random.seed(2)
    np.random.seed(2)
    for name, value in computed(build_deferred(DrawsOutsideOfTorch, 7)).items():
        assert torch.equal(value, first[name])
        assert torch.equal(value, whole.get_parameter(name))
    other = build_whole(DrawsOutsideOfTorch, 8)
    assert not torch.equal(other.drawn, whole.drawn)


def described(change: Callable[[nn.Linear], object], seed: int = 1) -> dict[str, str]:
    """Describe a layer that a constructor changes."""

    @torch.no_grad()
    def build() -> nn.Linear:
        layer = nn.Linear(3, 3)
        change(layer)
        return layer

    return describe_initial_values(build_deferred(build, seed))


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "nothing": lambda layer: None,
    "scalar": lambda layer: layer.weight.add_(1),
    "other scalar": lambda layer: layer.weight.add_(2),
    "literal": lambda layer: layer.weight.copy_(torch.tensor([1.0, 2.0, 3.0])),
    "other literal": lambda layer: layer.weight.copy_(torch.tensor([1.0, 2.0, 4.0])),
    "random": lambda layer: layer.weight.normal_(),
    "later random": lambda layer: (torch.rand(1), layer.weight.normal_()),
    "row": lambda layer: layer.weight[1].zero_(),
    "other row": lambda layer: layer.weight[2].zero_(),
    "part": lambda layer: setattr(layer, "weight", nn.Parameter(torch.rand(6, 3)[:3])),
    "other part": lambda layer: setattr(layer, "weight", nn.Parameter(torch.rand(6, 3)[3:])),
    "order": lambda layer: layer.weight.copy_(torch.rand(3) - torch.rand(1)),
    "other order": lambda layer: layer.weight.copy_(-torch.rand(3) + torch.rand(1)),
    "operands": lambda layer: layer.weight.copy_((lambda a, b: a - b)(*torch.rand(2, 3).clone())),
    "other operands": lambda layer: layer.weight.copy_(
        (lambda a, b: b - a)(*torch.rand(2, 3).clone())
    ),
    "bias": lambda layer: layer.bias.fill_(1),
}


def test_description_changes_with_initial_values() -> None:
    texts = {name: described(change) for name, change in CHANGES.items()}
    for name, change in CHANGES.items():
        assert described(change) == texts[name], name
    assert len({repr(text) for text in texts.values()}) == len(CHANGES)
    assert described(CHANGES["nothing"], seed=2) != texts["nothing"]
    # Reading values, as for a log on rank 0, changes nothing.
    assert described(lambda layer: float(layer.weight.clone().norm())) == texts["nothing"]
    # Operations of one parameter do not change the description of another.
    assert {k: v for k, v in texts["bias"].items() if "weight" in k} == {
        k: v for k, v in texts["nothing"].items() if "weight" in k
    }
    assert describe_initial_values(nn.Linear(3, 3)) == {}


STEPS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.normal_(),
    lambda x: x.uniform_(-1, 1),
    lambda x: x.mul_(0.5),
    lambda x: x + torch.randn(4, 6),
    lambda x: x.clone().clamp_(-1, 1),
    lambda x: (x[1, 2:].zero_(), x)[1],
    lambda x: x.t().contiguous().t(),
    lambda x: x.copy_(torch.rand(4, 1)),
    lambda x: torch.where(x > 0, x, torch.rand_like(x)),
    lambda x: torch.linalg.qr(x.double())[0].float() if x.shape[0] == x.shape[1] else x.abs(),
    lambda x: x.index_fill_(0, torch.tensor([1, 3]), 2.0),
]


def test_later_parameters_keep_the_order_of_the_module() -> None:
    module = build_deferred(lambda: nn.ModuleDict({f"{n}": nn.Linear(2, 2) for n in range(9)}), 1)
    record_more(module, lambda: None, 1, str)
    described = describe_initial_values(module)
    names = [name.partition(",")[0] for name in described]
    assert [*dict.fromkeys(names)] == [
        f"initial values of {name}" for name, _ in module.named_parameters()
    ]


@given(st.lists(st.sampled_from(range(len(STEPS))), max_size=8), st.integers(0, 2**62))
@settings(max_examples=30, deadline=None)
def test_any_operation_sequence_agrees_with_constructor(steps: list[int], seed: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            value, other = torch.zeros(4, 6).normal_(), torch.rand(4, 6)
            for step in steps:
                value, other = other, STEPS[step](value)
            self.value, self.other = nn.Parameter(value), nn.Parameter(other.detach().clone())

    whole = build_whole(Model, seed)
    values = computed(build_deferred(Model, seed))
    assert torch.equal(values["value"], whole.value)
    assert torch.equal(values["other"], whole.other)


def test_modules_on_the_meta_device_are_reset() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    values = computed(module, seed=5)
    assert values["0.weight"].abs().max() <= 3**-0.5
    assert torch.equal(values["1.running_var"], torch.ones(4))
    assert all(parameter.is_meta for parameter in module.parameters())
    again = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to("meta")
    assert torch.equal(computed(again, seed=5)["0.weight"], values["0.weight"])


class Holds(nn.Module):
    """Holds no tensors of its own, so its `reset_parameters` is not called."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def reset_parameters(self, value: float) -> None:
        raise AssertionError


class Resets(Holds):
    """Sets its own values and those of a submodule, which another module may hold, too."""

    def __init__(self, value: float, *parts: nn.Module) -> None:
        super().__init__(*parts)
        self.gain = nn.Parameter(torch.empty(1))
        self.value = value

    def reset_parameters(self, value: float | None = None) -> None:
        nn.init.constant_(self.gain, self.value)
        nn.init.constant_(self.parts[0].weight, self.value)


def test_parents_reset_values_after_their_submodules() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 4), Resets(2.0, nn.Linear(3, 4), nn.LayerNorm(3)))
        module.append(Resets(3.0, module[0]))
    recording = recording_of(module, 5)
    assert torch.equal(recording.compute("0.weight", CPU), torch.full((4, 3), 3.0))
    assert torch.equal(recording.compute("1.parts.0.weight", CPU), torch.full((4, 3), 2.0))
    assert torch.equal(recording.compute("1.parts.1.weight", CPU), torch.ones(3))


def test_values_that_are_not_on_the_meta_device_are_kept() -> None:
    given = nn.Linear(3, 4)
    expected = given.weight.clone()
    values = computed(nn.Sequential(Holds(given, nn.Linear(3, 4, device="meta"))))
    assert torch.equal(values["0.parts.0.weight"], expected)


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))


class Unset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


class ReadsMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.weight.detach().numpy()[0] = 1.0


def test_unknown_values_are_refused() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 4), NoReset())
    with pytest.raises(NotDeferrableError, match=r"nothing sets the initial values of 1\.gain"):
        recording_of(module, 0)
    with pytest.raises(NotDeferrableError, match="nothing sets the initial values of weight"):
        recording_of(build_deferred(Unset, 0), 0)
    with pytest.raises(NotDeferrableError, match="numpy"):
        build_deferred(ReadsMemory, 0)


class PlainTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.spectral_norm(nn.Linear(3, 4))
        self.nested = {"more": [1, (torch.rand(2), "text")]}


class KeepsView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.rows = [self.linear.weight.detach()[:2]]


class AssignsData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.weight.data = torch.ones(3)


class Tied(nn.Module):
    """Two parameters on one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.last.weight = nn.Parameter(self.first.weight)


class Columns(nn.Module):
    """Buffers in one storage."""

    def __init__(self) -> None:
        super().__init__()
        for name, part in zip(("cos", "sin"), torch.randn(9, 4).chunk(2, -1), strict=True):
            self.register_buffer(name, part)


class Halves(nn.Module):
    """Parameters and buffers in different parts of one storage."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.randn(9, 3)
        self.first, self.second = nn.Parameter(drawn[:3]), nn.Parameter(drawn[3:6])
        self.register_buffer("third", drawn[6:])


def changed(change: Callable[[nn.Parameter], object]) -> Callable[[], nn.Module]:
    """Return a constructor that changes a parameter."""

    def build() -> nn.Module:
        layer = nn.Linear(3, 3)
        change(layer.weight)
        return layer

    return build


LOST = [
    (Tied, "^shares memory between first.weight and last.weight$"),
    (changed(lambda p: p.register_hook(lambda g: g * 2)), "^registers a hook on weight$"),
    (
        changed(lambda p: setattr(p, "mask", torch.ones_like(p))),
        "^keeps a tensor in an attribute of w",
    ),
    (
        changed(lambda p: p.register_post_accumulate_grad_hook(lambda p: None)),
        "^registers a hook on weight$",
    ),
]


class OwnGenerator(nn.Module):
    """A parameter that is drawn again for each replay."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        nn.init.normal_(self.weight, generator=torch.Generator().manual_seed(0))


class OneDraw(nn.Module):
    """Two parameters of one draw."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.randn(4, generator=torch.Generator().manual_seed(0))
        self.first, self.second = nn.Parameter(drawn.clone()), nn.Parameter(drawn.clone())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (KeepsView, "^keeps a tensor in the attribute rows$"),
        (PlainTensors, "^keeps a tensor in the attribute nested$"),
        (AssignsData, "^assigns the data of weight, which is not recorded$"),
        (OwnGenerator, "^draws random numbers from its own generator$"),
        (lambda: nn.Linear(3, 4).half(), "^converts its parameters to another dtype, which prec"),
        *LOST,
    ],
)
def test_undeferrable_operations_are_named(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(NotDeferrableError, match=message):
        build_deferred(build, 0)


@pytest.mark.parametrize(("build", "message"), LOST)
def test_ties_and_hooks_on_the_meta_device_are_refused(
    build: Callable[[], nn.Module], message: str
) -> None:
    with torch.device("meta"):
        module = build()
    with pytest.raises(NotDeferrableError, match=message):
        recording_of(module, 0)


def test_attributes_of_parameters_are_kept() -> None:
    module = build_deferred(changed(lambda p: setattr(p, "no_decay", True)), 0)
    assert module.weight.no_decay
    materialize(module, initial_values(module, 0, None), torch.device("cpu"))
    assert module.weight.no_decay
    assert not hasattr(module.bias, "no_decay")


@pytest.mark.parametrize("build", [Halves, Columns])
def test_parts_of_one_storage_can_be_deferred(build: Callable[[], nn.Module]) -> None:
    values, whole = computed(build_deferred(build, 1)), build_whole(build, 1).state_dict()
    assert all(torch.equal(values[name], value) for name, value in whole.items())


def test_a_draw_from_an_own_generator_happens_once() -> None:
    module = build_deferred(OneDraw, 0)
    assert torch.equal(module.first, OneDraw().first)
    assert torch.equal(module.first, module.second)


def test_empty_parameter_can_be_deferred() -> None:
    module = build_deferred(lambda: nn.ParameterList([torch.empty(0, 3)]), 0)
    assert computed(module)["0"].shape == (0, 3)


def test_constructor_errors_pass_through() -> None:
    with pytest.raises(ZeroDivisionError):
        build_deferred(lambda: nn.Linear(1 // 0, 3), 0)


def test_tensor_outside_of_the_module_is_named_when_it_is_used() -> None:
    """The loss would be fake, and the host would read any number from it."""
    kept: list[Tensor] = []

    class Scaled(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs * kept[0])

    def build() -> nn.Module:
        kept.append(torch.randn(3))
        return Scaled(3, 1)

    engine = distmp.Engine(
        build,
        lambda model, batch: (model(batch).sum(), len(batch)),
        lambda named: torch.optim.SGD(named, lr=0.1, fused=True),
        policy="fp32",
        device="cpu",
    )
    with pytest.raises(ConfigError, match=r"model = 'tensor of shape \(3,\)': was made by the con"):
        engine.step([torch.ones(2, 3)])
    with pytest.raises(ConfigError, match="was made by the constructor"):
        torch.mul(torch.ones(3), 2, out=kept[0])
