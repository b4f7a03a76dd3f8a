"""Settings whose value is the name of a piece of code: merge, outer optimizer, codecs, adoption, plan, quorum policy.

A choice is one module in the package of its kind, and its name is the module's: `merges/rda_row.py` is "rda-row". No
list has to be edited: the packages are searched. Names and descriptions are found without importing the modules, so a
setting can be checked where there is no NumPy and no torch. The package's docstring says what a module in it defines.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from atoll.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Choice:
    """One kind of choice: the setting that names it, as `--set` writes it, and the package that holds its modules."""

    setting: str
    package: str

    def names(self) -> tuple[str, ...]:
        return tuple(_modules(self.package))

    def describe(self, name: str) -> str:
        """The first line of the module's docstring."""
        text = ast.get_docstring(ast.parse(_modules(self.package)[name].read_text())) or ""
        return text.partition("\n")[0]

    def check(self, name: str) -> None:
        if name not in self.names():
            raise ConfigError(f"{self.setting} = {name!r} is not known: use one of {', '.join(self.names())}")

    def load(self, name: str) -> Any:
        """The module. ConfigError: there is none of this name."""
        self.check(name)
        return _import(f"{self.package}.{name.replace('-', '_')}")


MERGE = Choice("merge", "atoll.numerics.merges")
OUTER_OPTIMIZER = Choice("outer_optimizer", "atoll.numerics.outers")
CODEC = Choice("codec", "atoll.numerics.codecs")
VERSION_CODEC = Choice("version_codec", "atoll.numerics.codecs")
PLAN = Choice("plan", "atoll.numerics.plans")
ADOPT = Choice("adopt", "atoll.learner.adoption")
QUORUM_POLICY = Choice("quorum_policy", "atoll.protocol.syncer.quorums")
CHOICES = (MERGE, OUTER_OPTIMIZER, CODEC, VERSION_CODEC, PLAN, ADOPT, QUORUM_POLICY)


@cache
def _modules(package: str) -> dict[str, Path]:
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None, f"{package} is a package of ours"
    places = list(spec.submodule_search_locations)
    return {
        module.name.replace("_", "-"): Path(module.module_finder.path) / f"{module.name}.py"  # type: ignore[union-attr]
        for module in iter_modules(places)
    }


_import = cache(import_module)
