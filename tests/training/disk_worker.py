"""Training on sets on disk, by one process or by those that torchrun started. What each process reads is counted."""

import json
import sys
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import setstream as ss
from setstream.data import NpySource, SetDataset, SetLoader, SourceChunks
from setstream.training import TrainConfig, Trainer
from setstream.training.task import Task

SIZES = (41, 3, 0, 112, 7, 64)
KINDS = ("sources", "chunks", "memory chunks")
READ: list[str] = []


class Counted(NpySource):
    """Notes what is read."""

    def read(self, start, stop):
        found = super().read(start, stop)
        READ.extend(f"{self.id}:{number}" for number in range(start, start + len(found)))
        return found


class OnDisk(Task):
    """Tell a number of each set."""

    name = "on-disk"

    def __init__(self, folder, kind):
        self.sources = [Counted(folder / f"{number}.npy", label=0.1 * number) for number in range(len(SIZES))]
        self.kind = kind

    def build(self, model, **options):
        encoder = ss.SetEncoder(nn.Linear(5, 8), ss.UMBC(8, num_slots=2, heads=2))
        return ss.SetModel(encoder, nn.Sequential(nn.Flatten(), nn.Linear(16, 1)))

    def batch(self, step, size, generator):
        chosen = [self.sources[number] for number in torch.randperm(len(SIZES), generator=generator)[:size].tolist()]
        sets = chosen
        if self.kind == "chunks":
            sets = SourceChunks(chosen, 16)
        elif self.kind == "memory chunks":
            sets = ss.Chunks([[source.tensor()[start : start + 16] for source in chosen] for start in range(0, 112, 16)])
        return {"sets": sets, "labels": torch.tensor([source.label for source in chosen])}

    def loss(self, model, batch, encode):
        return (model.head(encode(model.encoder, batch["sets"])).squeeze(1) - batch["labels"]).square().mean()

    def evaluate(self, model, *, quick=False):
        return {"nothing": 0.0}


def config(parallel):
    options = {"steps": 4, "batch": 4, "gradient": "exact", "chunk_size": 16, "checkpoint_every": 2, "tensorboard": False}
    return TrainConfig("on-disk", "umbc", **options, parallel=parallel)


def train(data, out, kind, parallel):
    READ.clear()
    trainer = Trainer(OnDisk(data, kind), config(parallel), out, shown=False)
    trainer.run()
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def loader_gradients(data, parallel):
    """One epoch of a SetLoader: the sum of all batches' gradients, and the ids of the sets that came."""
    READ.clear()
    torch.manual_seed(0)
    model = OnDisk(data, "sources").build("umbc")
    ids = []
    for batch in SetLoader(SetDataset(OnDisk(data, "sources").sources), 2, 16, shuffle=True, parallel=parallel):
        group = dist.group.WORLD if parallel == "set" and dist.is_initialized() else None
        z = ss.encode(model.encoder, batch.sets, gradient="exact", group=group)
        (model.head(z).squeeze(1) - torch.tensor(batch.labels)).square().sum().backward()
        ids += batch.ids
    return [p.grad.clone() for p in model.parameters()], ids


if __name__ == "__main__":
    data, out = Path(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    found = {}
    for kind, parallel in product(KINDS, ("data", "set")):
        weights = train(data, out / f"{kind} {parallel}", kind, parallel)
        found[kind, parallel] = weights, sorted(READ)
    found["resumed"] = train(data, out / "resumed", "sources", "set"), sorted(READ)
    for parallel in ("data", "set"):
        gradients, ids = loader_gradients(data, parallel)
        found["loader", parallel] = gradients, ids, sorted(READ)
    torch.save(found, out / f"rank{dist.get_rank()}.pt")
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps({"world": dist.get_world_size()}))
    dist.barrier()
    dist.destroy_process_group()
