"""Builds datasets from settings; checks their files, and datasets that users pass, before a run."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Sampler

from distmp.data.loading import attribute_of, is_stream
from distmp.data.settings import DataConfig
from distmp.data.streams import length_of
from distmp.data.text import TextDirectory, list_text_files
from distmp.data.tokens import W, Windows, check_validation, open_tokens
from distmp.errors import ConfigError, require
from distmp.utils.files import expanded
from distmp.utils.generators import generators_kept

_NOT_STANDARD_LIBRARY = ("site-packages", "dist-packages", "__pycache__")


class Datasets(NamedTuple):
    """The datasets of a run."""

    train: Any
    """Map-style (`__len__`, `__getitem__`) or iterable dataset."""

    validation: Any | None
    """Map-style dataset of held-out samples, an iterable one that ends, or None."""

    vocabulary_size: int | None
    """Number of different token ids; None if samples are not tokens."""

    description: str
    """One line that describes the data, for the log."""


def build_datasets(config: DataConfig) -> Datasets:
    """Build the datasets of a configuration.

    Raises:
        ConfigError: If files are missing, unreadable, empty, of the wrong size or too short for
            one sample, or a user's callable does not return a dataset.
    """
    build = {"text": _build_text, "tokens": _build_tokens}.get(config.source, _build_from_callable)
    return build(config)


def is_held_out(name: str, share: float) -> bool:
    """Return whether a file is used for validation, which a hash of its name determines.

    Args:
        name: Path relative to the directory, with forward slashes.
        share: Share of held-out names, on average, from 0 to 1.
    """
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


# --- text ---


def text_directory(
    config: DataConfig, path: str | None, setting: str = "data.path"
) -> TextDirectory:
    """Return the samples of all files of a text source.

    Args:
        config: The settings of the data.
        path: The directory; None for the standard library of the running Python.
        setting: The setting that names the directory.

    Raises:
        ConfigError: If there is no such directory, or no file in it can be used.
    """
    directory = expanded(path or sysconfig.get_path("stdlib"))
    skipped = _NOT_STANDARD_LIBRARY if path is None else ()
    files = list_text_files(directory, config.pattern, skipped, setting)
    return TextDirectory(directory, files, config.sequence_length)


def _build_text(config: DataConfig) -> Datasets:
    everything = text_directory(config, config.path)
    name = f"text below {everything.directory}"
    if config.path is None:
        name = f"standard library of Python {sysconfig.get_python_version()}"
    train, validation = _split_text(config, everything)
    _require_window("data.path", str(everything.directory), train)
    return _described(name, train, validation, TextDirectory.vocabulary_size)


def _split_text(
    config: DataConfig, everything: TextDirectory
) -> tuple[TextDirectory, TextDirectory | None]:
    if config.validation_path is not None:
        validation = text_directory(config, config.validation_path, "data.validation_path")
        _require_window("data.validation_path", str(validation.directory), validation)
        return everything, validation
    if config.held_out == 0.0:
        return everything, None
    directory, length = everything.directory, config.sequence_length
    held_out = {n: size for n, size in everything.files if is_held_out(n, config.held_out)}
    rest = {name: size for name, size in everything.files if name not in held_out}
    train = TextDirectory(directory, rest, length)
    validation = TextDirectory(directory, held_out, length)
    if len(train) and len(validation):
        return train, validation
    # With few files the hash may leave one side empty; then the tokens are split.
    return _split(config, everything)


# --- token files ---


def _build_tokens(config: DataConfig) -> Datasets:
    path, length = expanded(config.path or ""), config.sequence_length
    everything, metadata = open_tokens(path, length, "data.path")
    train, validation = everything, None
    if config.validation_path is not None:
        other = expanded(config.validation_path)
        validation, of_validation = open_tokens(other, length, "data.validation_path")
        check_validation(metadata, of_validation, other)
        _require_window("data.validation_path", str(other), validation)
    elif config.held_out > 0.0:
        train, validation = _split(config, everything)
    _require_window("data.path", str(path), train)
    return _described(f"tokens of {path}", train, validation, train.vocabulary_size)


# --- all ---


def _described(name: str, train: Any, validation: Any, vocabulary_size: int | None) -> Datasets:
    sizes = [0 if data is None else length_of(data) for data in (train, validation)]
    of_train, of_validation = ("a stream" if size is None else f"{size:,}" for size in sizes)
    # Whole text files are held out, so the share may differ from `data.held_out`.
    size, held_out = sizes
    share = f" ({held_out / (size + held_out):.1%})" if size and held_out else ""
    text = f"{name}: samples for training: {of_train}, held out: {of_validation}{share}"
    return Datasets(train, validation, vocabulary_size, text)


def _split(config: DataConfig, everything: W) -> tuple[W, W]:
    """Return the tokens for training, and the last ones, which are held out.

    Raises:
        ConfigError: If either side has less than one sample.
    """
    tokens, window = everything.last, config.sequence_length + 1
    split = tokens - round(tokens * config.held_out)
    problem = (
        f"of {tokens:,} tokens this leaves {split:,} for training and {tokens - split:,} held out,"
        f" and one sample needs {window:,}; add data, or hold out another share, or 0"
    )
    require(window <= split <= tokens - window, "data.held_out", config.held_out, problem)
    return everything.part(0, split), everything.part(split, tokens)


def _require_window(setting: str, path: str, dataset: Windows) -> None:
    tokens, window = dataset.last - dataset.first, dataset.sequence_length + 1
    problem = (
        f"its {tokens:,} tokens are too few where one sample needs {window:,}; add data, or lower"
        " data.sequence_length"
    )
    require(tokens >= window, setting, path, problem)


# --- a user's function ---


def _build_from_callable(config: DataConfig) -> Datasets:
    function = config.function()
    with generators_kept():  # a split at random has to be the same in both calls
        train = _call(config, function, "train")
    require(train is not None, "data.source", config.source, "returned None for split='train'")
    check_workers("data.workers", config.workers, train)
    validation = _call(config, function, "validation")
    return _described(config.source, train, validation, attribute_of(train, "vocabulary_size"))


def _call(config: DataConfig, function: Callable[..., Any], split: str) -> Any:
    dataset = function(split=split, sequence_length=config.sequence_length, **config.options)
    if dataset is None:
        return None
    if found := problem_of(dataset):
        problem = f"for split={split!r} it returned a {type(dataset).__name__}, which {found}"
        raise ConfigError("data.source", config.source, problem)
    return dataset


def identity(datasets: Datasets) -> dict[str, Any]:
    """Return the identity of the data for checkpoints, as numbers and text.

    Args:
        datasets: The datasets of the run. A dataset may have a method `digest() -> str`; that of
            files covers names, sizes and samples of the contents.
    """
    return {
        "samples": length_of(datasets.train),
        "vocabulary": datasets.vocabulary_size,
        "digest": _digest(datasets.train),
        "held_out": length_of(datasets.validation),
        "held_out_digest": _digest(datasets.validation),
    }


def _digest(dataset: Any) -> str | None:
    return dataset.digest() if hasattr(dataset, "digest") else None


# --- checks ---


def check_dataset(dataset: Any, workers: int) -> None:
    """Refuse an object that is no dataset, or one that is already divided over ranks or workers.

    Args:
        dataset: The object that the user passed.
        workers: Processes that read it.

    Raises:
        ConfigError: With the type of the object, and what to pass instead.
    """
    if problem := problem_of(dataset):
        raise ConfigError("dataset", type(dataset).__name__, problem)
    check_workers("workers", workers, dataset)


def check_workers(setting: str, workers: int, dataset: Any) -> None:
    """Refuse several workers for a stream.

    Raises:
        ConfigError: With the number of workers.
    """
    problem = "each worker would read the whole stream; use 1, which reads ahead, or 0"
    require(workers <= 1 or not is_stream(dataset), setting, workers, problem)


def problem_of(dataset: Any) -> str | None:
    """Return why samples cannot be read from an object, and what to do; None if they can."""
    if isinstance(dataset, TorchDataLoader | Sampler):
        return (
            "is not a dataset; pass its dataset (loader.dataset), without a DistributedSampler: "
            "distmp shuffles, divides the samples over the ranks, and collates"
        )
    if isinstance(dataset, Mapping):
        return f"holds several datasets; pass one of {', '.join(map(repr, list(dataset)[:5]))}"
    if isinstance(dataset, Iterator):
        return (
            "can be read only once; pass an object whose __iter__ begins a new pass, such as an "
            "IterableDataset, or a list of its samples"
        )
    if is_stream(dataset):
        if getattr(dataset, "_distributed", None) is None:  # of Hugging Face
            return _length_problem(dataset, needed=False)
        return (
            "is divided over the ranks by split_dataset_by_node; pass the dataset before that, "
            "because distmp divides it, too"
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return (
            "is not a dataset: it needs __len__ and __getitem__ (map-style), or __iter__ (iterable)"
        )
    return _length_problem(dataset, needed=True)


def _length_problem(dataset: Any, *, needed: bool) -> str | None:
    try:
        return None if len(dataset) or not needed else "has no sample"
    except (TypeError, ValueError, NotImplementedError) as error:  # also of Python
        if not (needed or isinstance(error, ValueError)):
            return None
        problem = str(error) or type(error).__name__
        return f"has no valid length ({problem}); return an integer of 1 or more from __len__"
