"""Builds modules without memory for their parameters, and computes initial values later.

A constructor runs unchanged, but large and random tensors are fake: they have shape, dtype and
device, but no memory. The operations on them are recorded and can be run later, for one
parameter at a time. Whatever the constructor does (`reset_parameters`, `self.apply(init)`,
`torch.randn(n) * 0.02`, a deep copy of a layer) is repeated on a real tensor of the same shape.

Each random operation has a separate seed, so values depend neither on the order in which parameters
are computed nor on the ranks that compute them.
"""

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from distmp.errors import ConfigError, DistmpError, listed
from distmp.utils.dtypes import dtype_name
from distmp.utils.generators import generators_kept, seed_generators
from distmp.utils.tensor_trees import (
    HeldTensor,
    added_attributes,
    checksum,
    held_tensors,
    parameter_like,
    replace_tensors,
    shared_memory,
)

if TYPE_CHECKING:
    from typing_extensions import Self

Module = TypeVar("Module", bound=nn.Module)

# Tensors with known values up to this size are created as usual: constructors read them
# (`torch.linspace(0, rate, depth).tolist()`), and they cost little.
SMALL_ELEMENTS = 2**16

_META = torch.device("meta")


class NotDeferrableError(DistmpError):
    """The initial values of a module cannot be computed one parameter at a time."""


@dataclass(frozen=True)
class _View:
    """Place of a fake tensor: the number of its storage, and where the tensor is in the storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Operation:
    """A recorded call.

    Attributes:
        function: An operator of aten.
        args: Its arguments; each fake tensor is replaced by its `_View`.
        kwargs: Its keyword arguments, with a `_View` for each fake tensor.
        results: The leaves of what it returned, with a `_View` for each fake tensor.
        reads: The storages of all its arguments.
        writes: The storages that it creates or changes.
        seed: Seed of a random operation; None for others.
    """

    function: Any
    args: Any
    kwargs: dict[str, Any]
    results: list[Any]
    reads: frozenset[int]
    writes: frozenset[int]
    seed: int | None


class Recording:
    """The operations of a constructor, and the parameters and buffers that they create.

    Attributes:
        views: Where each tensor without memory is, by its name in the module.
    """

    def __init__(self) -> None:
        self.views: dict[str, _View] = {}
        self._operations: list[_Operation] = []
        # Storage numbers by address. Tensors of recorded storages are kept, or an address could be
        # used again; they have no memory.
        self._numbers: dict[int, int] = {}
        self._kept: list[Tensor] = []
        self._writers: dict[int, list[int]] = defaultdict(list)

    @torch.no_grad()
    def compute(self, name: str, device: torch.device) -> Tensor:
        """Return the initial value of a parameter or buffer, computed on a device."""
        return self._replayed(self.views[name], device)

    def value(self, tensor: Tensor) -> Tensor:
        """Return the current value of a fake tensor, which a constructor reads."""
        return self._replayed(self.view(tensor), torch.device("cpu"))

    def is_known(self, tensor: Tensor) -> bool:
        """Return whether a recorded operation created a fake tensor; `p.data = real` does not."""
        return bool(self._writers[self._number(tensor)])

    def describe(self) -> dict[str, str]:
        """Return what determines initial values as text, for a comparison between ranks.

        Nothing is computed. Operations on which a parameter does not depend, such as a log on rank
        0, change nothing.
        """
        return {
            f"initial values of {name}, operation {number}": operation
            for name, view in self.views.items()
            for number, operation in enumerate(self._described_operations(view), 1)
        }

    def _described_operations(self, view: _View) -> Iterator[str]:
        for index in self._needed(view.storage):
            operation = self._operations[index]
            leaves = pytree.tree_leaves((operation.args, operation.kwargs, operation.results))
            arguments = ", ".join(map(_text, leaves))
            yield f"{operation.function}({arguments}), seed {operation.seed}"
        yield _text(view)

    def is_set(self, view: _View) -> bool:
        """Return whether an operation has set the values of a tensor, or it has none."""
        return 0 in view.size or any(
            self._operations[index].function.overloadpacket not in _UNINITIALIZED
            for index in self._writers[view.storage]
        )

    def view(self, tensor: Tensor) -> _View:
        """Return the place of a fake tensor."""
        size, offset = tuple(tensor.size()), int(tensor.storage_offset())
        return _View(self._number(tensor), tensor.dtype, size, tensor.stride(), offset)

    def add(
        self, function: Any, args: Any, kwargs: dict[str, Any], result: Any, seed: int | None
    ) -> None:
        """Record a call, and the seed of its random numbers."""
        reads = frozenset(self._storages((args, kwargs)))
        changed = frozenset(self._storages(_mutated(function, args, kwargs)))
        created = frozenset(self._storages(result)) - reads
        if not created and not changed:
            return  # a view: it shares its storage with an argument
        operation = _Operation(
            function,
            self._described(args),
            self._described(kwargs),
            pytree.tree_leaves(self._described(result)),
            reads,
            created | changed,
            seed,
        )
        for number in operation.writes:
            self._writers[number].append(len(self._operations))
        self._operations.append(operation)

    def _replayed(self, view: _View, device: torch.device) -> Tensor:
        replay = _Replay(device)
        with generators_kept(device):
            for index in self._needed(view.storage):
                replay.run(self._operations[index])
        return replay.tensor(view)

    def _needed(self, storage: int) -> list[int]:
        """Return the indices of the operations on which a storage depends, in order."""
        needed: set[int] = set()
        reached: dict[int, int] = {}
        pending = [(storage, len(self._operations))]
        while pending:
            number, end = pending.pop()
            if reached.get(number, -1) >= end:
                continue
            reached[number] = end
            for index in self._writers[number]:
                if index < end:
                    needed.add(index)
                    operation = self._operations[index]
                    pending += [(other, index) for other in operation.reads | operation.writes]
        return sorted(needed)

    def _storages(self, tree: Any) -> Iterator[int]:
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, FakeTensor):
                yield self._number(leaf)

    def _described(self, tree: Any) -> Any:
        def describe(tensor: Tensor) -> Any:
            return self.view(tensor) if isinstance(tensor, FakeTensor) else tensor.detach().clone()

        return pytree.tree_map_only(Tensor, describe, tree)

    def _number(self, tensor: Tensor) -> int:
        address = tensor.untyped_storage()._cdata
        if address not in self._numbers:
            self._numbers[address] = len(self._numbers)
            self._kept.append(tensor)
        return self._numbers[address]


def _text(leaf: Any) -> str:
    """Describe an argument or a result without what differs between ranks, such as addresses."""
    if isinstance(leaf, _View):
        return f"{dtype_name(leaf.dtype)} {leaf.size} of stride {leaf.stride} at {leaf.offset}"
    if isinstance(leaf, Tensor):
        return f"{dtype_name(leaf.dtype)} {tuple(leaf.shape)} {checksum(leaf):08x}"
    if isinstance(leaf, torch.device):
        return leaf.type  # the index is that of the rank
    printed = (bool, int, float, complex, str, type(None), torch.dtype)
    return repr(leaf) if isinstance(leaf, printed) else type(leaf).__name__


class _Replay:
    """Runs recorded operations on real tensors.

    Args:
        device: Where to run them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # All elements of each storage. Tensors are views of them, not `set_` to the storage, which
        # the cache of fake tensors would keep alive.
        self._storages: dict[int, Tensor] = {}

    def run(self, operation: _Operation) -> None:
        """Run an operation."""
        if operation.seed is not None:
            torch.manual_seed(operation.seed)
        args, kwargs = self._real((operation.args, operation.kwargs))
        if "device" in kwargs:
            kwargs["device"] = self._device
        results = pytree.tree_leaves(operation.function(*args, **kwargs))
        for described, result in zip(operation.results, results, strict=True):
            if isinstance(described, _View):
                size = result.untyped_storage().nbytes() // result.itemsize
                self._storages.setdefault(described.storage, result.as_strided((size,), (1,), 0))

    def tensor(self, view: _View) -> Tensor:
        """Return a tensor of a storage."""
        if view.storage not in self._storages:
            # Fake in a mode around the constructor, such as explain's, which needs no values.
            value = torch.empty_strided(view.size, view.stride, dtype=view.dtype)
            assert isinstance(value, FakeTensor), view
            return value.to(self._device)
        elements = self._storages[view.storage].view(view.dtype)
        return elements.as_strided(view.size, view.stride, view.offset)

    def _real(self, tree: Any) -> Any:
        def convert(leaf: Any) -> Any:
            if isinstance(leaf, _View):
                return self.tensor(leaf)
            if isinstance(leaf, Tensor) and leaf.dim() > 0:  # 0-dim tensors work on any device
                return leaf.to(self._device)
            return leaf

        return pytree.tree_map(convert, tree)


class _Seeded(TorchDispatchMode):
    """Gives each random operation a separate seed, and seeds numpy and Python at the beginning.

    Args:
        seed: Determines all of these seeds.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._random_operations = 0

    def __enter__(self) -> Self:
        seed_generators(f"model {self._seed}")
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run_real(func, args, kwargs or {}, self.next_seed(func))

    def next_seed(self, function: Any) -> int | None:
        """Return the seed of a call; None if the function is not random."""
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return None
        digest = hashlib.sha256(f"{self._seed}/{self._random_operations}".encode()).digest()
        self._random_operations += 1
        return int.from_bytes(digest[:8], "little") >> 1

    def run_real(self, function: Any, args: Any, kwargs: dict[str, Any], seed: int | None) -> Any:
        """Run an operation with a seed."""
        if seed is not None:
            torch.manual_seed(seed)
        return function(*args, **kwargs)


class _Fake(FakeTensorMode):
    """Makes tensors fake while a constructor runs.

    Attributes:
        ended: Whether that is over. A fake tensor outside of the module would make the loss fake,
            which the host reads as any number.
    """

    ended = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.ended:
            leaves = pytree.tree_leaves((args, kwargs))
            fake = next(leaf for leaf in leaves if isinstance(leaf, FakeTensor))
            problem = "was made by the constructor outside of the module; register it as a buffer"
            raise ConfigError("model", f"tensor of shape {tuple(fake.shape)}", problem)
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Recorder(_Seeded):
    """Makes large and random tensors fake, and records the operations on them."""

    def __init__(self, recording: Recording, seed: int) -> None:
        super().__init__(seed)
        self._recording = recording
        self._fake = _Fake(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        seed = self.next_seed(func)
        leaves = pytree.tree_leaves((args, kwargs))
        is_fake = any(isinstance(leaf, FakeTensor) for leaf in leaves)
        is_given = any(isinstance(leaf, Tensor | torch.Generator) for leaf in leaves)
        if not is_fake and (is_given or not _is_deferred(func, args, kwargs)):
            return self.run_real(func, args, kwargs, seed)
        if func.overloadpacket in _READS or _writes_to_real(func, args, kwargs):
            args, kwargs = pytree.tree_map_only(FakeTensor, self._recording.value, (args, kwargs))
            return self.run_real(func, args, kwargs, seed)
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            # Each replay of one operation would advance it.
            raise NotDeferrableError("draws random numbers from its own generator")
        with self._fake:
            result = func(*args, **kwargs)
        self._recording.add(func, args, kwargs, result, seed)
        return result

    def has_made(self, tensor: Any) -> bool:
        """Return whether this, and not a mode around it such as explain's, made a tensor fake."""
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self._fake


def build_deferred(
    build: Callable[[], Module], seed: int, device: torch.device | None = None
) -> Module:
    """Build a module whose large parameters are on the meta device, with values to be computed.

    Args:
        build: Returns the module.
        seed: Seed of the initial values.
        device: Keeps the generator of this device too, see `generators_kept`.

    Raises:
        NotDeferrableError: If the constructor does something that cannot be recorded; the message
            says what, without a subject.
    """
    recording = Recording()
    recorder = _Recorder(recording, seed)
    try:
        with generators_kept(device), recorder, warnings.catch_warnings():
            # torch does so to copy a tensor (`copy.deepcopy`).
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            module = build()
    except DistmpError:
        raise
    # The constructor reads the address or the memory of a tensor without memory.
    except (NotImplementedError, RuntimeError, TypeError) as error:
        needs = _CONVERTS if _CONVERSION in str(error) else "needs the values of its parameters"
        raise NotDeferrableError(f"{needs} ({type(error).__name__}: {error})") from error
    if not isinstance(module, nn.Module):
        return module  # callers refuse it with the name of the setting
    _leave_fake(module, recording, lambda tensor: isinstance(tensor, FakeTensor))
    _refuse_attributes(module, recorder.has_made)
    recorder._fake.ended = True
    _recordings[module] = recording
    return module


def record_more(
    module: nn.Module, create: Callable[[], None], seed: int, recorded_name: Callable[[str], str]
) -> None:
    """Add parameters to a module after its constructor, such as adapters.

    If `build_deferred` has built the module, they are recorded, and end on the meta device.

    Args:
        module: The module.
        create: Creates the parameters, and registers them in the module.
        seed: Seed of their initial values.
        recorded_name: Returns the former name of a parameter, which may have been moved to another
            submodule.
    """
    seed = int.from_bytes(hashlib.sha256(f"{seed} more".encode()).digest()[:7], "little")
    recording = _recordings.get(module)
    if recording is None:
        with generators_kept(), _Seeded(seed):
            create()
        return
    views = recording.views
    names = [held.name for held in held_tensors(module)]  # in an order that ranks share
    recording.views = {n: views[recorded_name(n)] for n in names if recorded_name(n) in views}
    recorder = _Recorder(recording, seed)
    with generators_kept(), recorder:
        create()
    # The others are on the meta device, where modes such as explain's make them fake, too.
    _leave_fake(module, recording, recorder.has_made)


def build_whole(build: Callable[[], Module], seed: int) -> Module:
    """Build a module with the initial values that `build_deferred` computes on the CPU."""
    with generators_kept(), _Seeded(seed):
        return build()


def is_recorded(module: nn.Module) -> bool:
    """Return whether `build_deferred` has built a module."""
    return module in _recordings


def describe_initial_values(module: nn.Module) -> dict[str, str]:
    """Return what determines the initial values of the tensors of a module on the meta device.

    Returns:
        Text by name, the same for equal constructors; empty if nothing is to be computed.
    """
    return _recordings[module].describe() if module in _recordings else {}


def recording_of(
    module: nn.Module,
    seed: int,
    device: torch.device | None = None,
    names: Collection[str] | None = None,
) -> Recording:
    """Return how the tensors of a module on the meta device get their initial values.

    Args:
        module: A module from `build_deferred`; or any other, whose tensors on the meta device are
            set by `reset_parameters` of the modules that hold some of them.
        seed: Seed of the initial values, if `build_deferred` has not built the module.
        device: Keeps the generator of this device too, see `generators_kept`.
        names: Names of the tensors whose values have to be known; None for all.

    Raises:
        NotDeferrableError: If values are unknown; it names the tensors.
    """
    if module not in _recordings:
        _recordings[module] = _record_resets(module, seed, device)
    recording = _recordings[module]
    views = recording.views
    needed = views if names is None else [name for name in views if name in names]
    if unknown := [name for name in needed if not recording.is_set(views[name])]:
        raise NotDeferrableError(f"nothing sets the initial values of {listed(unknown)}")
    return recording


def _record_resets(module: nn.Module, seed: int, device: torch.device | None) -> Recording:
    """Record how the modules of a model set its tensors on the meta device."""
    recording = Recording()
    recorder = _Recorder(recording, seed)
    is_fake = recorder.has_made
    meta = [held for held in held_tensors(module) if held.tensor.is_meta]
    _refuse_lost(meta)
    parts: dict[nn.Module, None] = {}
    module.apply(parts.setdefault)  # submodules first: their parent may change what they set
    with generators_kept(device), recorder:
        for held in meta:
            setattr(held.holder, held.key, _unset_like(held.tensor))
        for part in parts:
            reset = getattr(part, "reset_parameters", None)
            own = [*part.parameters(recurse=False)]
            has_fake = any(map(is_fake, (*own, *part.buffers(recurse=False))))
            if callable(reset) and has_fake and all(map(is_fake, own)):
                reset()
    for holder, key, name, tensor in meta:
        recording.views[name] = recording.view(getattr(holder, key))
        setattr(holder, key, tensor)
    return recording


_recordings: weakref.WeakKeyDictionary[nn.Module, Recording] = weakref.WeakKeyDictionary()

# torch's error if `module.half()` converts fake parameters.
_CONVERSION = "Couldn't swap"
_CONVERTS = "converts its parameters to another dtype, which precision.policy should do"

_aten = torch.ops.aten
# Operators that create a tensor without setting its values.
_UNINITIALIZED = (
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
)
# Operators that return values instead of tensors.
_READS = (_aten._local_scalar_dense, _aten.is_nonzero, _aten.equal)


def _is_deferred(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether the result of a factory is fake."""
    if not any(argument.name == "device" for argument in function._schema.arguments):
        return False
    is_random = torch.Tag.nondeterministic_seeded in function.tags
    if is_random or function.overloadpacket in _UNINITIALIZED:
        return True
    return bool(function(*args, **{**kwargs, "device": _META}).numel() > SMALL_ELEMENTS)


def _writes_to_real(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether an operator writes to a tensor that has memory."""
    return any(
        isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor)
        for leaf in pytree.tree_leaves(_mutated(function, args, kwargs))
    )


def _leave_fake(module: nn.Module, recording: Recording, is_fake: Callable[[Any], bool]) -> None:
    """Replace the fake tensors of a module by tensors on the meta device."""
    fake = [held for held in held_tensors(module) if is_fake(held.tensor)]
    if unknown := [held.name for held in fake if not recording.is_known(held.tensor)]:
        # By `parameter.data = tensor`, if the tensor has memory.
        raise NotDeferrableError(f"assigns the data of {listed(unknown)}, which is not recorded")
    for held in fake:
        recording.views[held.name] = recording.view(held.tensor)
    _refuse_lost(fake)
    replace_tensors(module, is_fake, lambda held: _unset_like(held.tensor, _META))


def _refuse_lost(replaced: Iterable[HeldTensor]) -> None:
    """Refuse what tensors in place of others would lose: hooks and a parameter's shared memory."""
    # A tied one once.
    named = {id(held.tensor): (held.name, held.tensor) for held in replaced}.values()
    for name, tensor in named:
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            raise NotDeferrableError(f"registers a hook on {name}")
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(added_attributes(tensor))):
            raise NotDeferrableError(f"keeps a tensor in an attribute of {name}")
    parameters = [each for each in named if isinstance(each[1], nn.Parameter)]
    others = [each for each in named if not isinstance(each[1], nn.Parameter)]
    if shared := shared_memory(parameters, others):
        raise NotDeferrableError(f"shares memory between {shared[0]} and {shared[1]}")


def _refuse_attributes(module: nn.Module, is_fake: Callable[[Any], bool]) -> None:
    """Refuse fake tensors in attributes of modules that are not parameters or buffers."""
    for prefix, part in module.named_modules():
        # `weight_norm`, `spectral_norm` and pruning set these again before each forward.
        hooks = part._forward_pre_hooks.values()
        again = {getattr(hook, key, None) for hook in hooks for key in ("name", "_tensor_name")}
        for key, attribute in vars(part).items():
            if key not in again and any(map(is_fake, pytree.tree_leaves(attribute))):
                name = f"{prefix}.{key}".lstrip(".")
                raise NotDeferrableError(f"keeps a tensor in the attribute {name}")


def _unset_like(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    bare = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return parameter_like(tensor, bare)
    return bare


def _mutated(function: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to."""
    arguments = function._schema.arguments
    given = {arguments[index].name: value for index, value in enumerate(args)} | kwargs
    return [
        given[argument.name]
        for argument in arguments
        if argument.name in given and argument.alias_info and argument.alias_info.is_write
    ]
