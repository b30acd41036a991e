"""Import paths of the release before: they work in this release, with a warning.

Documented modules have moved into packages that say what they are for. `import distmp.accelerate`
imports `distmp.integrations.accelerate`, and the two names are one module.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import CodeType, ModuleType

# A package stands for the modules in it.
MOVED = {
    "distmp.accelerate": "distmp.integrations.accelerate",
    "distmp.assembly": "distmp.training.setup",
    "distmp.bench": "distmp.commands.bench",
    "distmp.calibrate": "distmp.commands.calibrate",
    "distmp.checkpoint.export": "distmp.export.export",
    "distmp.checkpoint.weights": "distmp.export.weights",
    "distmp.doctor.facts": "distmp.commands.doctor.machine_info",
    "distmp.doctor": "distmp.commands.doctor",
    "distmp.explain": "distmp.commands.explain",
    "distmp.outcome": "distmp.engine.outcome",
    "distmp.parallel.world": "distmp.distributed.world",
    "distmp.preflight": "distmp.commands.preflight",
    "distmp.scaling.attribution": "distmp.diagnosis.attribution",
    "distmp.scaling.divergence": "distmp.engine.spike_check",
    "distmp.scaling.lockstep": "distmp.engine.rank_consistency",
    "distmp.slices": "distmp.utils.flat_shard",
    "distmp.stopping": "distmp.distributed.stopping",
    "distmp.trainer": "distmp.training.trainer",
}


def install() -> None:
    """Let `import` find the old paths."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        # In front: behind the old name of a package, Python would load its modules twice.
        sys.meta_path.insert(0, _MovedModules())


def new_name(name: str) -> str | None:
    """Return where a module is today, None if it has not moved."""
    for old, new in MOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return None


class _MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads the modules of `MOVED`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a specification for an old path, None for any other."""
        if new_name(fullname) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of today in the place of the old name."""
        sys.modules[module.__name__] = importlib.import_module(_warned(module.__name__))

    def get_code(self, fullname: str) -> CodeType:
        """Return what `python -m` with the old name runs."""
        new = _warned(fullname)
        source = f"import runpy\nrunpy.run_module({new!r}, run_name='__main__', alter_sys=True)\n"
        return compile(source, f"<{fullname}>", "exec")


def _warned(name: str) -> str:
    new = new_name(name)
    assert new is not None, f"{name} has not moved"
    # torch, too, takes FutureWarning for what users of its programs should see.
    warnings.warn(
        f"{name} is now {new}; the old name will be removed in the next release",
        FutureWarning,
        stacklevel=3,
    )
    return new
