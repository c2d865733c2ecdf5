"""Models as lists of layers, in the words of docs/recipes.md.

python -m tests.tasks.recipes          prints the rows of its tables as the models of today have them
"""

from collections.abc import Callable, Iterator
from functools import singledispatch
from itertools import chain
from typing import Any

import torch
from torch import nn

import setstream as ss
from setstream.pools.projected import Projected
from setstream.pools.sse import HierarchicalSSE
from setstream.tasks import released
from setstream.tasks.clustering import models as clustering
from setstream.tasks.clustering.released import MODELS as CLUSTERING
from setstream.tasks.completion.models import MODELS as COMPLETION_TEXT
from setstream.tasks.completion.released import MODELS as COMPLETION
from setstream.tasks.documents import models as documents
from setstream.tasks.documents import released as documents_released
from setstream.tasks.documents.language import Pretrained, SlotReader
from setstream.tasks.mil.models import MODELS as MIL_TEXT
from setstream.tasks.mil.released import MODELS as MIL
from setstream.tasks.registry import Masked

WIDTH = 48  # of the small BERT here; W in the page
PARTS = ("phi", "pool", "head")
Models = dict[str, Callable[..., ss.SetModel]]


@singledispatch
def layers(module: nn.Module) -> Iterator[str]:
    """The layers of a module that hold weights or a nonlinearity, in order."""
    yield from chain.from_iterable(layers(child) for child in module.children())


@layers.register
def _(module: nn.Linear) -> Iterator[str]:
    yield f"Linear {module.in_features}-{module.out_features}" + ("" if module.bias is not None else " without bias")


@layers.register(nn.ReLU)
@layers.register(nn.LayerNorm)
def _(module: nn.Module) -> Iterator[str]:
    yield type(module).__name__


@layers.register
def _(module: nn.Dropout) -> Iterator[str]:
    yield f"Dropout {module.p}"


@layers.register
def _(module: nn.Embedding) -> Iterator[str]:
    yield "word vectors"


@layers.register
def _(module: ss.DeepSets) -> Iterator[str]:
    yield {"max": "maximum"}.get(module.pool, module.pool)


@layers.register
def _(module: ss.UMBC) -> Iterator[str]:
    slots = {"gaussian": "a Gaussian each", "shared-gaussian": "one Gaussian", "learned": "learned"}[module.slots.kind]
    count = "1 slot" if module.num_slots == 1 else f"{module.num_slots} slots"
    yield f"{count} of {module.slot_dim}, {slots}"
    if module.slots.kind != "learned":
        yield "a draw per batch" if module.shared_draw else "a draw per set"
        yield "a fixed draw at test time" if module.slots.fixed is not None else "the mean at test time"
    if isinstance(module, released.NormedSlots):
        yield "LayerNorm on slots"
    if isinstance(module.query_norm, nn.LayerNorm):
        yield "LayerNorm on queries"
    if module.query.bias is not None:
        yield "query bias"
    heads = "1 head" if module.heads == 1 else f"{module.heads} heads"
    weights = module.activation.name + ("" if module.activation.normalise else " summed")
    yield f"{module.in_dim}-{module.out_dim}, {heads}, {weights}"
    if module.slot_residual:
        yield "plus queries"
    if isinstance(module.norm, nn.LayerNorm):
        yield "LayerNorm"


@layers.register
def _(module: HierarchicalSSE) -> Iterator[str]:
    many = [", ".join(layers(layer)) for layer in module.layers]
    yield from repeats(many) if len(set(many)) < len(many) else [", then ".join(many)]
    if module.pool is not None:
        yield f"{module.pool} over slots"


@layers.register
def _(module: ss.nn.FSPool) -> Iterator[str]:
    yield f"FSPool of {module.pieces} pieces"


@layers.register
def _(module: ss.nn.DiffEM) -> Iterator[str]:
    sizes = f"{module.heads} x {module.components} components"
    yield f"Diff EM, {sizes}, {module.steps} steps, strength {module.strength}".replace(" 1 steps", " 1 step")


def attention(block: Any, name: str, extra: str = "") -> str:
    mine = isinstance(block, ss.nn.MAB)
    heads = block.attention.heads if mine else block.heads
    norm = ", LayerNorm" if isinstance(block.norm1, nn.LayerNorm) else ""
    return f"{name}{'' if mine else '*'} ({extra}{heads} head{'s' * (heads > 1)}{norm})"


@layers.register(ss.nn.SAB)
@layers.register(released.SAB)
def _(module: Any) -> Iterator[str]:
    yield attention(module.block, "SAB")


@layers.register(ss.nn.PMA)
@layers.register(released.PMA)
def _(module: Any) -> Iterator[str]:
    count = len(module.seeds)
    yield attention(module.block, "PMA", f"{count} seed{'s' * (count > 1)}, ")


@layers.register(ss.nn.ISAB)
@layers.register(released.ISAB)
def _(module: Any) -> Iterator[str]:
    yield attention(module.spread, "ISAB", f"{len(module.gather.seeds)} points, ")


@layers.register
def _(module: ss.nn.SetTransformer) -> Iterator[str]:
    yield from chain.from_iterable(layers(block) for block in (*module.before, module.pool, *module.after, module.out))


@layers.register
def _(module: ss.GatedAttention) -> Iterator[str]:
    yield f"gated attention, {module.score.in_features} hidden"


@layers.register
def _(module: ss.DSMIL) -> Iterator[str]:
    value = "no value layer" if isinstance(module.value, nn.Identity) else f"value {', '.join(layers(module.value))}"
    yield f"DS-MIL, {module.pool(2).hidden} hidden, {value}"


@layers.register
def _(module: ss.Parallel) -> Iterator[str]:
    yield "; ".join(f"{name}: {', '.join(layers(pool))}" for name, pool in module.pools.items())


@layers.register
def _(module: Projected) -> Iterator[str]:
    yield from chain(layers(module.module), layers(module.pool))


@layers.register(Masked)
def _(module: Masked) -> Iterator[str]:
    yield from layers(module.modules_)


@layers.register
def _(module: SlotReader) -> Iterator[str]:
    yield f"BERT without positions on [CLS] and slots, its {'pooler' if module.pool == 'cls' else 'mean'}"


def repeats(names: list[str]) -> list[str]:
    """Runs of the same one or two layers, counted: ["a", "b", "a", "b"] is ["2 x (a, b)"]."""
    shown: list[str] = []
    while names:
        period, count = max(((p, runs(names, p)) for p in (2, 1)), key=lambda found: found[0] * (found[1] - 1))
        unit = ", ".join(names[:period])
        shown.append(f"{count} x ({unit})" if count > 1 else names[0])
        names = names[period * count if count > 1 else 1 :]
    return shown


def runs(names: list[str], period: int) -> int:
    count = 1
    while names[period * count : period * (count + 1)] == names[:period] and len(names) >= period * (count + 1):
        count += 1
    return count


def recipe(model: ss.SetModel) -> dict[str, str]:
    """phi, pool and head of a model, in words."""
    parts = {"phi": model.encoder.phi, "pool": model.encoder.pool, "head": model.head}
    words = {name: ", ".join(repeats(list(layers(part)))) or "none" for name, part in parts.items()}
    return {name: text.replace(f"-{WIDTH}", "-W").replace(f" {WIDTH}-", " W-") for name, text in words.items()}


class NoLanguage(nn.Module):
    """In the place of a BERT: the readers of slots need its sizes only."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"pad_token_id": 0, "hidden_size": WIDTH, "max_position_embeddings": 512})()

    def get_input_embeddings(self) -> nn.Embedding:
        return nn.Embedding(2, WIDTH)

    def set_input_embeddings(self, table: nn.Embedding) -> None:
        pass


def of_documents(part: Callable[..., ss.SetModel]) -> Callable[..., ss.SetModel]:
    read = Pretrained(NoLanguage(), torch.zeros(9, WIDTH), torch.zeros(WIDTH), torch.zeros(WIDTH))
    return lambda: part(documents.Shared(read, 52, nn.Embedding(9, WIDTH), documents.DROPOUT))


def of_mil(build: Callable[..., ss.SetModel], **options: Any) -> Callable[..., ss.SetModel]:
    return lambda: build(in_dim=256, **options)


#: For every section of the page: its models with plain names and the released ones.
TASKS: dict[str, tuple[Models, Models]] = {
    "Clustering": (dict(clustering.MODELS), CLUSTERING),
    "Image completion": (dict(COMPLETION_TEXT), COMPLETION),
    "Long documents": (
        {name: of_documents(part) for name, part in documents._PARTS.items()},
        {f"{name}-released": of_documents(part) for name, part in documents_released._PARTS.items()},
    ),
    "Multiple instance learning": (
        {name: of_mil(build, two_stream=name != "ds-mil") for name, build in MIL_TEXT.items()},
        {name: of_mil(build) for name, build in MIL.items()},
    ),
}


def differences(section: str) -> list[str]:
    """The rows of a section's table: a part that differs between the recipes, in one model or several, before and after."""
    plain, all_released = TASKS[section]
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name in all_released:
        short = name.removesuffix("-released")
        pair = recipe(plain[short]()), recipe(all_released[name]())
        for part in PARTS:
            if pair[0][part] != pair[1][part]:
                rows.setdefault((part, pair[0][part], pair[1][part]), []).append(f"`{short}`")
    return [f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in rows.items()]


if __name__ == "__main__":
    for section in TASKS:
        print("", f"## {section}", "", *differences(section), sep="\n")
