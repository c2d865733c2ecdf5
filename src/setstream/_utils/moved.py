"""Modules that had another name in 0.1: importing the old name gives the new module, with a DeprecationWarning."""

import re
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: Names within setstream, old=new. They will be removed in 0.3.
OLD_AND_NEW = """
    collectives=states.reduce data.ahead=_utils.prefetch data.arrow_ipc=data.formats.arrow data.files=data.formats
    data.parquet=data.table_sets data.part=sets.source data.registry=_utils.registry data.served=sets.chunks
    data.source=sets.source data.tables=data.formats.table drawn=gradients.unbiased durable=_utils.atomic
    encoder=models.encoder fingerprint=states.fingerprint importance=gradients.importance layout=sets.layout model=models.model
    partition=sets.partition parts=states.accumulators passes=gradients.exact places=_utils.import_path pool=pools.base
    pretrained=models.pretrained pure=models.functional scale=bulk scale.bulk=bulk.encode scale.journal=bulk.journal
    scale.partial=bulk.partial scale.ray=bulk.ray scale.rows=bulk.output scale.scatter=sets.chunks serve.run=serve.app
    state=states.state state_io=states.serialization store=stores.store store_postgres=stores.postgres
    store_rows=stores.backend store_sqlite=stores.sqlite stream=models.stream weights=models.weights
"""
MOVED: dict[str, str] = dict(re.findall(r"(\S+)=(\S+)", OLD_AND_NEW))


class _Moved(MetaPathFinder, Loader):
    """Finds modules under their old names."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == "setstream" and name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = f"setstream.{MOVED[spec.name.partition('.')[2]]}"
        warnings.warn(f"{spec.name} is now {new}; the old name is removed in 0.3", DeprecationWarning, stacklevel=3)
        module = import_module(new)
        spec.loader_state = module.__spec__  # importing sets another one; `exec_module` restores this one
        return module

    def exec_module(self, module: ModuleType) -> None:
        if (spec := module.__spec__) is not None and spec.loader is self:
            module.__spec__ = spec.loader_state


def install() -> None:
    """Let old names be imported."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Moved())  # first: a package's old name has the submodules of its new one
