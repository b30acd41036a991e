"""Finds the base classes of plugins and strategies in the package of Lightning that a script uses.

Lightning is distributed under two names with separate classes: `lightning` contains
`lightning.pytorch` and `lightning.fabric`; the other package is `pytorch_lightning` with
`lightning_fabric`. A Trainer accepts only plugins of its own package.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import Any, TypeVar

from distmp.errors import ConfigError, nearest

Bound = TypeVar("Bound")

_STANDALONE = ("pytorch_lightning", "lightning_fabric")
# By name of the package: the modules of the Trainer and of Fabric. The Trainer's plugins are
# plugins of Fabric, too.
PACKAGES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": _STANDALONE,
}


def package_in_use(package: str | None = None) -> str:
    """Return the key of `PACKAGES` of the package that this process has imported.

    Args:
        package: The user's choice; None selects the imported package.

    Raises:
        ConfigError: If not exactly one package is imported and `package` does not select one.
        ImportError: If none is installed.
    """
    if package is not None:
        if package not in PACKAGES:
            raise ConfigError("package", package, nearest(package, PACKAGES))
        return package
    imported = [name for name, parts in PACKAGES.items() if any(p in sys.modules for p in parts)]
    if len(imported) == 1:
        return imported[0]
    if not imported and not any(find_spec(part) for part in ("lightning", *_STANDALONE)):
        raise _not_installed("lightning")
    names = " and ".join(imported) or "no package of Lightning"
    raise ConfigError(
        "package",
        None,
        f"{names} is imported, and classes of its packages differ; import Trainer or Fabric first, "
        "or pass package='lightning' or package='pytorch_lightning', from which you import it",
    )


def precision_class(package: str) -> Any:
    """Return the base class of precision plugins: that of the Trainer if the package has one.

    Raises:
        ImportError: If the package is not installed.
    """
    for module in PACKAGES[package]:
        try:
            return importlib.import_module(f"{module}.plugins.precision").Precision
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
    raise _not_installed(package)


def strategy_class(package: str) -> Any:
    """Return the Trainer's class of DDP strategies.

    Raises:
        ImportError: If the package has no Trainer, or is not installed.
    """
    trainer = PACKAGES[package][0]
    if find_spec(trainer.partition(".")[0]) is None:
        raise _not_installed(package)
    return importlib.import_module(f"{trainer}.strategies").DDPStrategy


def bound_class(cls: type[Bound], base: Any, package: str) -> type[Bound]:
    """Return a subclass of `cls` and of a class of Lightning, for Lightning's checks by class.

    Args:
        cls: The class with distmp's methods.
        base: The class of Lightning; methods of `cls` find it in `_base`.
        package: The key of `PACKAGES` that `base` is from.
    """
    names = {
        "_base": base,
        "_package": package,
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
    }
    return type(cls.__name__, (cls, base), names)


def _not_installed(package: str) -> ImportError:
    return ImportError(f"{package} is not installed; run pip install 'distmp[trainers]'")


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside of Lightning's wrappers of optimizers."""
    # `LightningOptimizer` and `_FabricOptimizer` both have `optimizer` and `_strategy`.
    return optimizer.optimizer if hasattr(optimizer, "_strategy") else optimizer
