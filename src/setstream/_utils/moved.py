"""Modules that had another name in 0.1: importing the old name gives the new module, with a DeprecationWarning."""

import re
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: Names within setstream, old=new; a new name that begins with a dot is in the same folder. They will be removed in 0.3.
OLD_AND_NEW = """
    cli.app=.commands cli.demo=.report cli.evaluate=.train cli.options=.train collectives=states.reduce
    data.ahead=_utils.prefetch data.arrow_ipc=.formats.arrow data.files=.formats data.parquet=.table_sets data.part=sets.source
    data.registry=_utils.registry data.served=sets.chunks data.slides.camelyon=.folder data.slides.layout=.grid
    data.slides.resize=.pyramid data.slides.tissue=.grid data.slides.write=.pyramid data.source=sets.source
    data.tables=.formats.table drawn=gradients.unbiased durable=_utils.atomic encoder=models.encoder
    fingerprint=states.fingerprint importance=gradients.importance integrations.sklearn.classifier=.estimators
    integrations.sklearn.featurizer=.estimators integrations.sklearn.regressor=.estimators layout=sets.layout model=models.model
    nn.anchors=.mlp nn.attention=.set_transformer partition=sets.partition parts=states.accumulators passes=gradients.exact
    places=_utils.import_path pool=pools.base pools.block_sums=.kernels.block_sums pools.shared_rows=.kernels.shared_rows
    pools.weighted_sums=.kernels.weighted_sums pretrained=models.pretrained pure=models.functional report.animation=.page
    report.clustering=tasks.clustering.task report.completion=tasks.completion.task report.documents=tasks.documents.task
    report.plotting=.page report.streams=tasks.clustering.task scale=bulk scale.bulk=bulk.encode scale.journal=bulk.journal
    scale.partial=bulk.partial scale.ray=bulk.ray scale.rows=bulk.encode scale.scatter=sets.chunks serve.live=.service
    serve.log=.app serve.metrics=.guard serve.playground.clusters=.tabs serve.playground.messages=.tabs
    serve.playground.pictures=.tabs serve.problems=.answers serve.run=.app serve.watching=.routes state=states.state
    state_io=states.serialization store=stores.store store_postgres=stores.postgres store_rows=stores.backend
    store_sqlite=stores.sqlite stream=models.stream tasks.clustering.streams=.task tasks.completion.anchored=.models
    tasks.documents.anchored=.models tasks.documents.corpus=.corpora tasks.documents.eurlex=.corpora
    tasks.documents.longformer=.language tasks.documents.metrics=.task tasks.documents.pubmed=.corpora
    tasks.documents.readers=.language tasks.documents.reuters=.corpora tasks.documents.rfcs=.corpora
    training.allocator=.processes training.crossval=cli.crossval training.optimizer=.checkpoint training.progress=.record
    training.seeds=.task training.signals=.processes training.stages=.checkpoint weights=models.weights
"""
PAIRS = re.findall(r"(\S+)=(\S+)", OLD_AND_NEW)
MOVED: dict[str, str] = {old: old.rpartition(".")[0] + new if new[0] == "." else new for old, new in PAIRS}


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
