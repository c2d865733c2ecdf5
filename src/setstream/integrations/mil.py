"""Weights of other libraries' attention MIL in streaming pools::

    model = load("s_0_checkpoint.pt")                       an ss.SetModel: it streams, merges, serves, saves, draws heat maps

    CLAM         CLAM_SB, CLAM_MB; gated or not, old and new, in DataParallel     logits (B, n_classes), for a softmax
    MIL-Lab      ABMIL, with which FEATHER is published                           logits (B, num_classes), for a softmax
    torchmil     ABMIL and CLAM_SB with tanh, gated or not                        one logit (B, 1), for a sigmoid

The names of the weights tell the library, and their shapes all sizes. Not loaded: instance classifiers and their loss, which
take no part in a prediction, and the bias of the attention scores, which a softmax over the set does not see. A MIL-Lab model
without a classifier gives the slide's features. Files are safetensors, or torch's with weights_only=True: nothing that a file
names is run.
"""

import re
from collections.abc import Mapping
from itertools import count, takewhile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from typing import cast as typed

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from setstream.data.formats.file import existing, reading
from setstream.errors import ConfigurationError, DataError
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.models.weights import on_meta
from setstream.tasks.mil.models import MODELS

FIRST, GATE, SCORE = (rf"encoder.pool.{name}" for name in (r"content.0.\1", r"gate.0.\1", "score.weight"))
DECODER, PART, NET = r"head.decoder.\1", "(weight|bias)", r"attention_net\.(?:module\.)?"
IGNORED = ""
#: For each library: how the names of its files begin, and its names as patterns, with setstream's (the bias of the
#: scores is not loaded). Numbers of layers depend on dropout: `#` stands for the place among those with weights.
LIBRARIES: dict[str, tuple[str, dict[str, str]]] = {
    "CLAM": (
        "attention_net.",
        {
            rf"{NET}(?P<layer>0)\.(?P<part>weight|bias)": r"encoder.phi.layers.#.\g<part>",
            rf"{NET}[23]\.(?:attention_a|module)\.0\.{PART}": FIRST,
            rf"{NET}[23]\.attention_b\.0\.{PART}": GATE,
            rf"{NET}[23]\.(?:attention_c|module\.[23])\.weight": SCORE,
            rf"{NET}[23]\.(?:attention_c|module\.[23])\.bias": IGNORED,
            rf"classifiers\.{PART}": DECODER,
            r"classifiers\.(?P<row>\d+)\.(?P<part>weight|bias)": r"head.decoder.\g<part>",
            r"instance_classifiers\..*|instance_loss_fn\..*": IGNORED,
        },
    ),
    "MIL-Lab": (
        "global_attn.",
        {
            r"patch_embed\.(?P<layer>\d+)\.(?P<part>weight|bias)": r"encoder.phi.layers.#.\g<part>",
            rf"global_attn\.(?:attention_a|module)\.0\.{PART}": FIRST,
            rf"global_attn\.attention_b\.0\.{PART}": GATE,
            r"global_attn\.(?:attention_c|module\.[23])\.weight": SCORE,
            r"global_attn\.(?:attention_c|module\.[23])\.bias": IGNORED,
            rf"classifier\.{PART}": DECODER,
        },
    ),
    "torchmil": (
        "pool.fc1.",
        {
            rf"pool\.fc1\.module\.{PART}": FIRST,
            rf"pool\.fc_gated\.module\.{PART}": GATE,
            r"pool\.fc2\.weight": SCORE,
            rf"classifier\.module\.{PART}": DECODER,
            r"feat_ext\.(.+)": r"encoder.phi.\1",
            r"inst_classifiers\..*|inst_loss_fn\..*": IGNORED,
        },
    ),
}


def load(source: str | Path | Mapping[str, Tensor], *, phi: nn.Module | None = None) -> SetModel:
    """A model of CLAM, MIL-Lab (FEATHER) or torchmil with its weights, in eval mode.

    Args:
        source: A file (.safetensors; .pt, .pth, .ckpt or .bin with weights only), or a state dict.
        phi: torchmil's `feat_ext`, built by your code; needed if the weights contain one, whose layers they do not describe.

    Raises:
        DataError: If the file cannot be read, or holds anything but weights.
        ConfigurationError: If these are not all weights of one such model; the message lists every name that does not fit.

    >>> sizes = {"pool.fc1.module.weight": (8, 16), "pool.fc1.module.bias": (8,), "pool.fc2.weight": (1, 8)}
    >>> sizes |= {"classifier.module.weight": (1, 16), "classifier.module.bias": (1,)}
    >>> model = ss.integrations.mil.load({name: torch.randn(size) for name, size in sizes.items()})
    >>> model(torch.randn(1, 100, 16)).shape
    torch.Size([1, 1])
    """
    weights = _read(Path(source)) if isinstance(source, str | Path) else dict(source)
    while weights and (prefix := next((p for p in ("module.", "model.") if all(n.startswith(p) for n in weights)), None)):
        weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    library = next((name for name, (start, _) in LIBRARIES.items() if any(n.startswith(start) for n in weights)), None)
    if library is None:
        known = ", ".join(f"{name} ({start}*)" for name, (start, _) in LIBRARIES.items())
        raise ConfigurationError(f"these are not the weights of {known}; their names are {sorted(weights)}")
    renamed = _renamed(weights, library)
    extractor = [place for place in renamed if library == "torchmil" and place.startswith("encoder.phi.")]
    if bool(extractor) != (phi is not None):
        names = sorted(name for name in weights if name.startswith("feat_ext."))
        advice = "pass phi=, the module that they belong to" if extractor else "leave phi out"
        raise ConfigurationError(f"weights of a feature extractor (feat_ext) in this file: {names}; {advice}")
    name, options = _described(renamed, library, by_class=any(re.match(r"classifiers\.\d", name) for name in weights))

    def build() -> SetModel:
        model = MODELS[name](**options)
        return model if phi is None else SetModel(SetEncoder(phi, model.encoder.pool), model.head)

    expected = {
        place: tuple(tensor.shape) for place, tensor in (on_meta(build) if phi is None else build()).state_dict().items()
    }
    given = {place: tuple(tensor.shape) for place, tensor in renamed.items()}
    if wrong := [place for place in sorted(expected.keys() | given.keys()) if expected.get(place) != given.get(place)]:
        shapes = [f"{place} is {given.get(place, 'missing')}, not {expected.get(place, 'known')}" for place in wrong]
        raise ConfigurationError(f"these weights of {library} do not fit each other, renamed: {'; '.join(shapes)}")
    model = build()
    model.load_state_dict(renamed)
    return (model if phi is not None else model.remember(MODELS[name], options)).eval()


def _read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name. Nothing in it is run, and each tensor is stored whole."""
    if existing(path).suffix == ".safetensors":
        with reading(path):
            return load_file(path)
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise DataError(
            f"{path}: holds more than weights, or is no file of torch. Only weights are read, because anything else would run "
            "code of the file: save model.state_dict() instead of the model"
        ) from error
    except Exception as error:
        raise DataError(f"{path}: cannot be read as a file of torch, it may be truncated: {error}") from error
    for key in ("state_dict", "model_state_dict", "model"):
        held = held[key] if isinstance(held, dict) and isinstance(held.get(key), dict) else held
    if not isinstance(held, dict) or not held:
        raise DataError(f"{path}: expected a mapping of names to tensors, a state dict; it holds {type(held).__name__}")
    for name, tensor in held.items():
        whole = isinstance(name, str) and isinstance(tensor, Tensor) and tensor.layout == torch.strided
        if not whole or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise DataError(f"{path}: {name!r} is not a tensor that is stored whole; a state dict has nothing else")
    return held


def _renamed(weights: Mapping[str, Tensor], library: str) -> dict[str, Tensor]:
    """The weights by setstream's names; an error lists all that the library does not have."""
    patterns = {re.compile(pattern): place for pattern, place in LIBRARIES[library][1].items()}
    known = {
        name: next(((m, place) for pattern, place in patterns.items() if (m := pattern.fullmatch(name))), None)
        for name in weights
    }
    if unknown := sorted(name for name, match in known.items() if match is None):
        raise ConfigurationError(f"these names are not those of a model of {library} that is known: {unknown}")
    matches = {name: match for name, match in known.items() if match is not None and match[1] != IGNORED}
    layers = sorted({int(m["layer"]) for m, _ in matches.values() if "layer" in m.re.groupindex})
    renamed: dict[str, Tensor] = {}
    rows: dict[str, dict[int, Tensor]] = {}
    for name, (match, template) in matches.items():
        place, tensor = match.expand(template), weights[name]
        if "row" in match.re.groupindex:
            rows.setdefault(place, {})[int(match["row"])] = tensor
            continue
        if "layer" in match.re.groupindex:
            place = place.replace("#", str(2 * layers.index(int(match["layer"]))))  # a ReLU after each
        if place in renamed:
            raise ConfigurationError(f"{name} and another weight are both {place} in a model of {library}")
        renamed[place] = tensor
    for place, parts in rows.items():
        if len({part.shape for part in parts.values()}) > 1 or sorted(parts) != list(range(len(parts))) or place in renamed:
            shapes = {number: tuple(part.shape) for number, part in parts.items()}
            raise ConfigurationError(f"classifiers of {library} are numbered from 0 and have one shape; got {shapes}")
        renamed[place] = torch.cat([parts[number] for number in sorted(parts)])
    return renamed


def _described(renamed: Mapping[str, Tensor], library: str, by_class: bool) -> tuple[str, dict[str, Any]]:
    """The name of the model and its options, from the shapes of its weights."""
    matrices = {place: tensor for place, tensor in renamed.items() if place.endswith("weight")}
    places = (f"encoder.phi.layers.{2 * number}.weight" for number in count())
    layers = [matrices[place] for place in takewhile(matrices.__contains__, places)]
    needed = {place: matrices.get(place) for place in ("encoder.pool.content.0.weight", SCORE)}
    if wrong := [place for place, tensor in (needed | dict(enumerate(layers))).items() if tensor is None or tensor.dim() != 2]:
        raise ConfigurationError(f"a model of {library} has the matrices {wrong}, renamed; got {sorted(matrices)}")
    content, score = (typed(Tensor, tensor) for tensor in needed.values())
    decoder = matrices.get("head.decoder.weight")
    options: dict[str, Any] = {
        "in_dim": (layers[0] if layers else content).shape[1],
        "widths": [len(layer) for layer in layers],
    }
    options |= {"hidden": len(content), "gated": any(place.startswith("encoder.pool.gate.") for place in renamed)}
    options |= {"outputs": 0 if decoder is None else len(decoder)}
    if library == "CLAM":
        return "clam-mb" if by_class else "clam-sb", options
    return "ab-mil", options | {"branches": len(score)}
