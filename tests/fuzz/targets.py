"""What is attacked: originals that can be read, how they are damaged, and who reads them.

A target gives `originals(folder)`, bytes under a name, and `read(name, data, folder)`, which may raise nothing but our errors.
"""

import json
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import setstream as ss
from setstream.serve.bodies import parse_elements
from setstream.tasks.loading import open_model
from tests.compat import encoders
from tests.data.test_hostile import mutated, read_everything, write_all
from tests.serve.mutations import mutate, whole_bodies

GOLDEN = Path(encoders.__file__).parent / "0.1"


@dataclass(frozen=True)
class Target:
    """A kind of input: what it is made of, how it is damaged, how it is read."""

    originals: Callable[[Path], dict[str, bytes]]
    damage: Callable[[bytes, random.Random], bytes]
    read: Callable[[str, bytes, Path], None]


# -- bodies of requests -----------------------------------------------------------------------------------------------


def bodies(folder: Path) -> dict[str, bytes]:
    """Arrow, npy and JSON."""
    return {f"{number} {kind}": body for number, (kind, body) in enumerate(whole_bodies())}


def read_body(name: str, data: bytes, folder: Path) -> None:
    """As the server does."""
    parse_elements(name.split(" ", 1)[1], data)


# -- states -----------------------------------------------------------------------------------------------------------


def states(folder: Path) -> dict[str, bytes]:
    """One of each pool, of this version and of 0.1."""
    found = {}
    for name in encoders.POOLS:
        found[f"{name}.old"] = (GOLDEN / "states" / f"{name}.safetensors").read_bytes()
        with torch.no_grad():
            found[f"{name}.new"] = _encoder(name).update(None, encoders.elements(1)).to_bytes()
    return found


_encoders: dict[str, ss.SetEncoder] = {}


def _encoder(name: str) -> ss.SetEncoder:
    if name not in _encoders:
        encoder = encoders.build(name)
        encoder.load_state_dict(torch_weights(GOLDEN / "states" / f"{name}.weights.safetensors"))
        _encoders[name] = encoder
    return _encoders[name]


def torch_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file."""
    from safetensors.torch import load_file

    return load_file(path)


def damage_state(data: bytes, draw: random.Random) -> bytes:
    """Damaged bytes; or an edited state whose checksum fits, as somebody would make who means it."""
    if draw.random() < 0.5:
        return mutate(data, draw)
    try:
        state = ss.State.from_bytes(data)
    except ss.errors.StateFormatError:
        return data
    part = draw.choice(list(state.accumulators.values()))
    name = draw.choice(list(part.tensors))
    tensor = part.tensors[name].clone()
    number = draw.choice([float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e300, -1e300, 1e-300])
    change = draw.randrange(5)
    if change == 0 and tensor.numel():
        tensor.view(-1)[draw.randrange(tensor.numel())] = torch.tensor(number, dtype=torch.float64).to(tensor.dtype)
    elif change == 1:
        tensor = tensor.unsqueeze(-1).expand(*tensor.shape, draw.choice([1, 3, 50])).contiguous()
    elif change == 2:
        tensor = tensor.to(draw.choice([torch.float16, torch.int32, torch.bool, torch.float32]))
    elif change == 3:
        tensor = tensor[..., :0]
    else:
        state.count = torch.tensor([draw.choice([-1, 0, 1, 2**40, 2**62])])
    part.tensors[name] = tensor
    return state.to_bytes()


def read_state(name: str, data: bytes, folder: Path) -> None:
    """As an upload is read, and then used."""
    model = ss.SetModel(_encoder(name.rpartition(".")[0]), nn.Identity())
    stream = model.stream(chunks="average")
    with torch.no_grad():
        stream.update(encoders.elements(2))
        stream.merge(ss.State.from_bytes(data))
        stream.predict()


# -- files ------------------------------------------------------------------------------------------------------------


def files(folder: Path) -> dict[str, bytes]:
    """Sets in files of every format."""
    found = {}
    for kind in ("arrow", "parquet", "h5", "npy", "pt", "images"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        found |= {f"{kind}-{path.name}": path.read_bytes() for path in write_all(kind, folder / kind)}
    return found


def read_file(name: str, data: bytes, folder: Path) -> None:
    """All elements of all its sets."""
    path = folder / "damaged" / f"damaged{Path(name).suffix}"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read_everything(path)
    finally:
        path.unlink(missing_ok=True)


# -- config.json ------------------------------------------------------------------------------------------------------

CODE = ["subprocess:getoutput", "os:system", "builtins:exec", "setstream.cli.__main__:MODELS[x]", "tests.fuzz.targets:pwned"]


def pwned(*_: object, **__: object) -> nn.Module:
    """What no file may get to run."""
    raise SystemExit("a config.json ran code")


def configs(folder: Path) -> dict[str, bytes]:
    """Those of saved models and of a run, as 0.1 wrote them."""
    found = {path.parent.name: path.read_bytes() for path in GOLDEN.glob("models/*/config.json")}
    return found | {"run": (GOLDEN / "run" / "config.json").read_bytes()}


def damage_config(data: bytes, draw: random.Random) -> bytes:
    """A value at any depth becomes a name of code, or something else than it was; or bytes are damaged."""
    if draw.random() < 0.3:
        return mutate(data, draw)
    config = json.loads(data)
    here = config
    while True:
        key = draw.choice([*here, "backbone", "bert", "phi"]) if isinstance(here, dict) else draw.randrange(len(here))
        inner = here.get(key) if isinstance(here, dict) else here[key]
        if isinstance(inner, dict | list) and inner and draw.random() < 0.7:
            here = inner
            continue
        here[key] = draw.choice([*CODE, *CODE, None, -1, 2**40, 1e9, "", "../../x", [], {}, True, [[]] * 3, {"a": CODE[0]}])
        return json.dumps(config).encode()


def read_config(name: str, data: bytes, folder: Path) -> None:
    """As `open_model` does."""
    place = folder / name
    origin = GOLDEN / ("run" if name == "run" else f"models/{name}")
    if not place.is_dir():
        place.mkdir(parents=True)
        (place / "model.safetensors").symlink_to((origin / "model.safetensors").resolve())
    (place / "config.json").write_bytes(data)
    open_model(str(place))


TARGETS = {
    "bodies": Target(bodies, mutate, read_body),
    "states": Target(states, damage_state, read_state),
    "files": Target(files, mutated, read_file),
    "configs": Target(configs, damage_config, read_config),
}
