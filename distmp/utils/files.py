"""Replaces files atomically, reads regular files safely, and finds those of presets."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from distmp.errors import ConfigError, nearest, require

# Suffixes of weight and checkpoint files, refused in names of directories.
_OF_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
# Permissions of files that may contain secrets: only the user can read them.
PRIVATE = 0o600


@contextmanager
def replacing(path: str | os.PathLike[str], mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block ends without an error.

    Readers see the old content or the new one, never a part. After an error the old one remains.

    Args:
        path: The file to replace or create, or a link to it. Its directory must exist.
        mode: Permissions of the file, reduced by the umask of this process.

    Yields:
        A binary file, open for writing.

    Raises:
        OSError: If it cannot be written, or is not a regular file.
    """
    path = Path(os.path.realpath(path))
    if os.path.lexists(path) and not path.is_file():
        raise OSError(errno.EINVAL, "Not a regular file")
    # In the same directory, so on the same file system: the rename is atomic.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
            yield file
            file.flush()
            # Without it a power failure may leave an empty file under the new name.
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with `~` expanded; that of an unknown user stays, where pathlib raises."""
    return Path(os.path.expanduser(path))


def check_directory_name(setting: str, directory: str | os.PathLike[str]) -> None:
    """Refuse a directory for checkpoints or weights whose name ends like that of a file.

    Raises:
        ConfigError: If it ends with `.pt`, `.safetensors` or similar.
    """
    suffix = Path(directory).suffix
    problem = f"names a directory, not a file; use a name without {suffix!r}"
    require(suffix.lower() not in _OF_FILES, setting, str(directory), problem)


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the content of a regular file.

    Does not open pipes, which may block, or devices such as `/dev/zero`, which have no end.

    Args:
        path: The file, or a link to it.
        limit: Largest size in bytes.

    Raises:
        OSError: If it cannot be read, is not a regular file, or is larger.
    """
    path = Path(path)
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        is_directory = stat.S_ISDIR(status.st_mode)
        raise OSError(errno.EINVAL, "Is a directory" if is_directory else "Not a regular file")
    if status.st_size > limit:
        raise OSError(errno.EFBIG, f"{status.st_size} bytes, more than {limit}")
    return path.read_bytes()


def visible_files(
    directory: Path, setting: str, skipped_directories: Collection[str] = ()
) -> Iterator[str]:
    """Yield the relative paths of all files and broken links below a directory, with slashes.

    Hidden names are skipped. Links to directories are followed, but each directory is listed once:
    by its own name, if that is listed.

    Args:
        directory: The directory.
        setting: Name of the setting that holds the directory, for error messages.
        skipped_directories: Names of directories to skip.

    Raises:
        ConfigError: If a directory cannot be listed, or a link leads to one that contains this one.
    """

    def unreadable(error: OSError) -> None:
        problem = f"cannot list {error.filename}: {error.strerror}"
        raise ConfigError(setting, str(directory), problem) from error

    around = Path(os.path.realpath(directory)).parents
    listed: set[str] = set()
    # Links come after what has its own name, and sorted: all machines list the same names.
    walks = [os.walk(directory, onerror=unreadable)]
    for parent, directories, names in chain.from_iterable(walks):
        place = os.path.realpath(parent)
        problem = f"the link {parent} leads to a directory that contains this one; remove it"
        require(Path(place) not in around, setting, str(directory), problem)
        if place in listed:
            directories.clear()
            continue
        listed.add(place)
        directories[:] = sorted(
            f for f in directories if f not in skipped_directories and not f.startswith(".")
        )
        links = filter(os.path.islink, [os.path.join(parent, each) for each in directories])
        walks += [os.walk(link, onerror=unreadable) for link in links]
        for name in names:
            path = os.path.join(parent, name)
            # Reading a broken link gives an error. Sockets and pipes are skipped: no file is lost.
            is_file = os.path.isfile(path) or not os.path.exists(path)
            if is_file and not name.startswith("."):
                yield os.path.relpath(path, directory).replace(os.sep, "/")


# This limits the time to about a second, also on a network file system.
TOTAL_BYTES = 16 << 20
_MOST_BLOCKS = 256
_BLOCK_BYTES = 4096


def sampled_digests(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the size and a digest of each file, or why it cannot be read.

    Of large files, only the beginning, the end and blocks at pseudo-random offsets are read. With
    more than 4,096 files, only the sizes count.

    Args:
        files: The files by the names that they have on every machine.
    """
    blocks = min(_MOST_BLOCKS, TOTAL_BYTES // (_BLOCK_BYTES * max(1, len(files))))
    return {name: _sample(path, blocks) for name, path in files.items()}


def _sample(path: Path, blocks: int) -> str:
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256()
            for offset in _offsets(size, blocks):
                digest.update(os.pread(file.fileno(), _BLOCK_BYTES, offset))
    except OSError as error:
        return f"not readable ({error.strerror})"
    return f"{size:,} bytes {digest.hexdigest()[:16]}"


def _offsets(size: int, blocks: int) -> Iterator[int]:
    if size <= blocks * _BLOCK_BYTES:
        yield from range(0, size, _BLOCK_BYTES)
    elif blocks:
        chosen = random.Random(size)
        yield from (0, size - _BLOCK_BYTES)
        yield from (chosen.randrange(size - _BLOCK_BYTES) for _ in range(blocks - 2))


# A configuration that is part of the package is named by `preset:NAME` in place of a path.
PRESET_PREFIX = "preset:"
CONFIGURATION = ".yaml"
MODEL = ".json"


def preset_directory() -> Path:
    """Return the directory of the presets: `configs/` in a clone, `presets` in a wheel."""
    package = Path(__file__).parents[1]
    installed = package / "presets"
    return installed if installed.is_dir() else package.parent / "configs"


def preset_names(suffix: str = CONFIGURATION) -> list[str]:
    """Return the names of the presets with a suffix: configurations of runs, or of models."""
    return sorted(file.stem for file in preset_directory().glob(f"*{suffix}"))


def preset_purpose(name: str) -> str:
    """Return what a configuration is for: the first line of its comment."""
    with (preset_directory() / f"{name}{CONFIGURATION}").open() as lines:
        return next(lines).removeprefix("#").strip()


def located(setting: str, path: str, suffix: str = CONFIGURATION) -> str:
    """Return the path of the file that `preset:NAME` names; other paths are returned unchanged.

    Args:
        setting: Name of the setting, for the message.
        path: Path of a file, or `preset:NAME`.
        suffix: Suffix of the file of the preset.

    Raises:
        ConfigError: If there is no such preset, or a path that does not exist has the name of one.
    """
    if not path.startswith(PRESET_PREFIX):
        name = Path(path).name.removesuffix(suffix)
        problem = f"there is no such file; did you mean '{PRESET_PREFIX}{name}'?"
        usable = name not in preset_names(suffix) or os.path.exists(expanded(path))
        require(usable, setting, path, problem)
        return path
    name, known = path.removeprefix(PRESET_PREFIX), preset_names(suffix)
    require(name in known, setting, path, f"there is no such preset; {nearest(name, known)}")
    return str(preset_directory() / f"{name}{suffix}")
