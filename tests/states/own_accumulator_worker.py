"""Run under torchrun: two ranks that hold parts of sets get the encoding, and the gradient, of one process."""

import torch
import torch.distributed as dist

import setstream as ss
from tests.states.own_accumulators import make


def main():
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    sets = [torch.randint(20, (n, 3), generator=torch.Generator().manual_seed(n)).float() for n in (41, 23, 1)]
    local = ss.scatter_sets(sets)
    for name, modes in {"top-k": ("full", "exact", "unbiased", "none"), "count-min": ("none",)}.items():
        encoder = make(name)
        parameters = list(encoder.parameters())
        expected = ss.encode(encoder, sets, gradient="full")
        for gradient in modes:
            z = ss.encode(encoder, local, chunk_size=6, gradient=gradient, grad_chunks=99, group=group)
            torch.testing.assert_close(z, expected)
            if gradient != "none":
                gradients = [torch.autograd.grad(y.square().sum(), parameters, retain_graph=True) for y in (z, expected)]
                torch.testing.assert_close(*gradients)
    if dist.get_rank() == 0:
        print("own accumulators: all equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
