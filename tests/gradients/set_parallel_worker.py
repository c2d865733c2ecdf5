"""Run under torchrun: every rank holds a part of every set, and compares z and gradients with those of one process."""

import datetime
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import setstream as ss
from setstream import testing
from setstream.testing.gradients import default_loss


def make(pool):
    torch.manual_seed(0)
    return ss.SetEncoder(nn.Sequential(nn.Linear(3, 8), nn.Tanh()), pool)


def gradients(encoder, head, sets, **options):
    parameters = [*encoder.parameters(), *head.parameters()]
    torch.manual_seed(5)  # the slots' draw
    options = {"generator": torch.Generator().manual_seed(3)} | options  # so that partitions leave the slots' draw alone
    z = ss.encode(encoder, sets, chunk_size=6, **options)
    z = z if isinstance(z, torch.Tensor) else torch.cat([v.flatten(1) for v in z.values()], 1)
    value = default_loss(head(z.flatten(1)))
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    return z.detach(), [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head, self.options = make(ss.UMBC(8, 3, heads=2, slot_residual=True)), nn.Linear(24, 2), options

    def forward(self, x):
        z = ss.encode(self.encoder, x, chunk_size=5, generator=torch.Generator().manual_seed(3), **self.options)
        return self.head(z.flatten(1)).square().mean()


def data_parallel(rank):
    """Sets over ranks, each rank with sets of its own: DistributedDataParallel gives the mean of the ranks' gradients."""
    batches = [torch.randn(2, 17, 3, generator=torch.Generator().manual_seed(i)) for i in range(dist.get_world_size())]
    for gradient in ("full", "exact", "unbiased", "importance"):
        wrapped = nn.parallel.DistributedDataParallel(Net(gradient=gradient))
        wrapped(batches[rank]).backward()
        alone = Net(gradient=gradient)
        for batch in batches:
            (alone(batch) / len(batches)).backward()
        for a, b in zip(wrapped.module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    if rank == 0:
        print("data parallel: all equal")


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    rank = dist.get_rank()
    group = dist.group.WORLD
    if sys.argv[1:] == ["die"]:
        encoder = make(ss.UMBC(8, 3))
        if rank == 1:
            os._exit(7)
        ss.encode(encoder, torch.randn(1, 10, 3), gradient="exact", group=group)
        return
    if sys.argv[1:] == ["ddp"]:
        data_parallel(rank)
        dist.destroy_process_group()
        return
    sets = [torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) for n in (41, 23, 1)]
    mine = ss.scatter_sets(sets)
    assert sum(len(x) for x in mine) < 65
    torch.manual_seed(2)  # the same weights on every rank
    pools = {
        "umbc": ss.UMBC(8, 3, heads=2, slot_residual=True, norm_after=True),
        "gaussian": ss.UMBC(8, 3, slots="gaussian"),
        "sigmoid": ss.UMBC(8, 3, activation="sigmoid", fold=False),
        "mean": ss.DeepSets("mean"),
        "max": ss.DeepSets("max"),
        "parallel": ss.Parallel(a=ss.UMBC(8, 2), b=ss.DeepSets("min")),
    }
    for name, pool in pools.items():
        encoder = make(pool).train()
        torch.manual_seed(1)
        width = {"mean": 8, "max": 8, "parallel": 24}.get(name, 24)
        head = nn.Linear(width, 2)
        expected_z, expected = gradients(encoder, head, sets, gradient="full")
        if rank == 1 and name == "gaussian":
            torch.manual_seed(99)  # ranks need not agree on their random streams
        for options in (
            {"gradient": "full"},
            {"gradient": "exact"},
            {"gradient": "unbiased", "grad_chunks": 99},
            {"gradient": "importance", "grad_chunks": 99},
            {"gradient": "subset", "grad_chunks": 99},
        ):
            z, found = gradients(encoder, head, mine, group=group, **options)
            torch.testing.assert_close(z, expected_z, rtol=1e-4, atol=1e-5)
            for a, b in zip(found, expected, strict=True):
                scale = float(b.abs().max()) + 1e-3
                assert float((a - b).abs().max()) < 2e-5 * scale, (name, options, float((a - b).abs().max()), scale)
    # Sampled modes: on average over draws, the same on every rank, the full gradient.
    encoder, head = make(ss.UMBC(8, 3, heads=2, slot_residual=True)).double().eval(), nn.Linear(24, 2).double()
    for p in [*encoder.parameters(), *head.parameters()]:
        dist.broadcast(p.data, 0)
    doubles = [x.double() for x in sets]
    _, expected = gradients(encoder, head, doubles, gradient="full")
    mine = ss.scatter_sets(doubles)
    for gradient in ("unbiased", "importance") if dist.get_world_size() == 2 else ():
        generator = torch.Generator().manual_seed(rank)
        draws = []
        for _ in range(300):
            _, found = gradients(encoder, head, mine, group=group, gradient=gradient, generator=generator, partition="random")
            draws.append(torch.cat([g.flatten() for g in found]))
        draws = torch.stack(draws)
        same = draws.clone()
        dist.broadcast(same, 0)
        torch.testing.assert_close(same, draws)
        full = torch.cat([g.flatten() for g in expected])
        z = (draws.mean(0) - full).abs() / (draws.std(0) / 300**0.5 + 1e-9 * full.abs().max())
        assert float(z.max()) < testing.z_bound(len(full)), (gradient, float(z.max()))
    if rank == 0:
        print("set parallel: all equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
