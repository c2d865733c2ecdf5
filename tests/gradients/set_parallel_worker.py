"""Run under torchrun: every rank holds a part of every set, and compares z and gradients with those of one process.

With the argument `all`: also DistributedDataParallel, the sampled modes, and at the end a rank that dies.
"""

import datetime
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn

import setstream as ss
from setstream import testing
from setstream.testing.gradients import default_loss
from tests.gradients.builders import make, mean_of_copies


def gradients(encoder, head, sets, loss=default_loss, **options):
    parameters = [*encoder.parameters(), *head.parameters()]
    torch.manual_seed(5)  # the slots' draw
    options = {"generator": torch.Generator().manual_seed(3)} | options  # so that partitions leave the slots' draw alone
    z = ss.encode(encoder, sets, chunk_size=6, **options)
    z = z if isinstance(z, torch.Tensor) else torch.cat([v.flatten(1) for v in z.values()], 1)
    found = torch.autograd.grad(loss(head(z.flatten(1))), parameters, allow_unused=True)
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


def set_parallel(rank, sets):
    """Every mode that takes all chunks gives the full gradient of one process."""
    group = dist.group.WORLD
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
        "passes": ss.MultiPass([ss.UMBC(8, 3, slots="gaussian"), ss.UMBC(8, 3, slots="given")], nn.Linear(8, 8)),
        "ab-mil": ss.GatedAttention(8, hidden=4),
        "ds-mil": ss.DSMIL(8, num_classes=2, hidden=4),
    }
    for name, pool in pools.items():
        encoder = make(pool).train()
        torch.manual_seed(1)
        width = {"mean": 8, "max": 8, "ab-mil": 8, "ds-mil": 4}.get(name, 24)
        head = nn.Linear(width, 2)
        expected_z, expected = gradients(encoder, head, sets, gradient="full")
        if rank == 1 and name in ("gaussian", "passes"):
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
    if rank == 0:
        print("set parallel: all equal")


def sampled_set_parallel(rank, sets, groups=100, copies=10):
    """groups * copies = 1,000 draws, the same on every rank, have the full gradient as their mean.

    The copies of the sets in one call are independent draws; the standard error is that of the means of the groups.
    """
    encoder, head = make(ss.UMBC(8, 3, heads=2, slot_residual=True)).double().eval(), nn.Linear(24, 2).double()
    for p in [*encoder.parameters(), *head.parameters()]:
        dist.broadcast(p.data, 0)
    doubles = [x.double() for x in sets]
    full = torch.cat([g.flatten() for g in gradients(encoder, head, doubles, gradient="full")[1]])
    options = {"loss": mean_of_copies(copies), "group": dist.group.WORLD, "partition": "random"}
    mine = ss.scatter_sets(doubles * copies)
    for gradient in ("unbiased", "importance"):
        options |= {"gradient": gradient, "generator": torch.Generator().manual_seed(rank)}
        draws = torch.stack(
            [torch.cat([g.flatten() for g in gradients(encoder, head, mine, **options)[1]]) for _ in range(groups)]
        )
        same = draws.clone()
        dist.broadcast(same, 0)
        torch.testing.assert_close(same, draws)
        z = (draws.mean(0) - full).abs() / (draws.std(0) / groups**0.5 + 1e-9 * full.abs().max())
        assert float(z.max()) < testing.z_bound(len(full)), (gradient, float(z.max()))
    if rank == 0:
        print("sampled: unbiased")


def lose_a_rank(rank):
    """Rank 1 dies; rank 0, which waits for it, must get an error before torchrun ends it."""
    encoder = make(ss.UMBC(8, 3))
    if rank == 1:
        os._exit(7)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        ss.encode(encoder, torch.randn(1, 10, 3), gradient="exact", group=dist.group.WORLD)
    except RuntimeError:
        print("dead rank: error")


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    rank = dist.get_rank()
    sets = [torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) for n in (41, 23, 1)]
    set_parallel(rank, sets)
    if sys.argv[1:] == ["all"]:
        sampled_set_parallel(rank, sets)
        data_parallel(rank)
        sys.stdout.flush()
        lose_a_rank(rank)
    else:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
