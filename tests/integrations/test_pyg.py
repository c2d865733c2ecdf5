"""Pools as aggregations of PyG: the same numbers as the pools, inside a GNN, with gradients."""

import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCNConv, MessagePassing, global_mean_pool
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, SumAggregation

import setstream as ss
from setstream.errors import ConfigurationError, ShapeError
from setstream.integrations.pyg import DeepSetsAggregation, PoolAggregation, SSEAggregation, UMBCAggregation

AGGREGATIONS = {
    "umbc": lambda: UMBCAggregation(8, num_slots=4, heads=2),
    "umbc-gaussian": lambda: UMBCAggregation(8, num_slots=4, out_dim=6, slots="gaussian"),
    "sse": lambda: SSEAggregation(8, num_slots=4, pool="mean"),
    "mean": lambda: DeepSetsAggregation("mean"),
    "parallel": lambda: PoolAggregation(ss.Parallel(slots=ss.UMBC(8, num_slots=2), most=ss.DeepSets("max"))),
}


def groups(sizes):
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_any_order_ptr_and_each_group_alone_agree(name):
    aggregate = AGGREGATIONS[name]().eval()
    sizes = [3, 0, 1, 9, 4, 0]
    x, index = torch.randn(sum(sizes), 8), groups(sizes)
    z = aggregate(x, index, dim_size=6)
    assert z.dim() == 2
    assert len(z) == 6
    order = torch.randperm(len(x))
    torch.testing.assert_close(aggregate(x[order], index[order], dim_size=6), z, atol=1e-5, rtol=1e-4)
    ptr = torch.tensor([0, *sizes]).cumsum(0)
    torch.testing.assert_close(aggregate(x, ptr=ptr), z, atol=1e-5, rtol=1e-4)
    for group in range(6):
        alone = aggregate(x[index == group], torch.zeros(sizes[group], dtype=torch.int64), dim_size=1)
        torch.testing.assert_close(alone[0], z[group], atol=1e-5, rtol=1e-4)
    assert torch.isfinite(z).all()
    assert aggregate(x).shape == z[:1].shape  # no index: one group


@pytest.mark.parametrize(("pool", "theirs"), [("mean", MeanAggregation), ("sum", SumAggregation), ("max", MaxAggregation)])
def test_plain_pools_are_pygs_own(pool, theirs):
    x, index = torch.randn(40, 8), torch.randint(0, 7, (40,))
    torch.testing.assert_close(DeepSetsAggregation(pool)(x, index, dim_size=8), theirs()(x, index, dim_size=8))


def test_slots_stay_apart_where_asked():
    x, index = torch.randn(5, 8), torch.tensor([0, 0, 1, 1, 1])
    rows = UMBCAggregation(8, num_slots=4, flatten=False)
    assert rows(x, index).shape == (2, 4, 8)
    assert set(PoolAggregation(ss.Parallel(a=ss.DeepSets("max")), flatten=False)(x, index)) == {"a"}


def test_the_pool_itself_is_what_aggregates():
    x = torch.randn(2, 6, 8)
    pool = ss.UMBC(8, num_slots=4).eval()
    index = torch.tensor([0, 1]).repeat(6)
    rows = x.transpose(0, 1).flatten(0, 1)  # the two sets take turns
    torch.testing.assert_close(PoolAggregation(pool)(rows, index), pool(x).flatten(1), atol=1e-5, rtol=1e-4)


class Net(torch.nn.Module):
    def __init__(self, readout):
        super().__init__()
        self.first, self.second, self.readout = GCNConv(3, 8), GCNConv(8, 8), readout
        self.out = torch.nn.LazyLinear(1)

    def forward(self, data):
        h = self.first(data.x, data.edge_index).relu()
        return self.out(self.readout(self.second(h, data.edge_index), data.batch, dim_size=data.num_graphs)).squeeze(-1)


def spread_graphs(count, generator):
    """Rings whose nodes have the same mean, narrow or wide: no mean pooling of raw features tells them apart."""
    graphs = []
    for number in range(count):
        size = int(torch.randint(5, 12, (1,), generator=generator))
        ring = torch.arange(size)
        edges = torch.stack([torch.cat([ring, (ring + 1) % size]), torch.cat([(ring + 1) % size, ring])])
        x = torch.randn(size, 3, generator=generator) * (1.0 + 3.0 * (number % 2))
        graphs.append(Data(x=x - x.mean(0), edge_index=edges, y=torch.tensor([float(number % 2)])))
    return Batch.from_data_list(graphs)


def test_a_gnn_learns_through_it():
    generator = torch.Generator().manual_seed(0)
    train, test = spread_graphs(64, generator), spread_graphs(64, generator)
    net = Net(UMBCAggregation(8, num_slots=2, heads=2))
    net(train)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(net(train), train.y).backward()
        optimizer.step()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    # Chance is 32 of 64 with a deviation of 4: 52 is five of them.
    assert int(((net.eval()(test) > 0) == (test.y > 0)).sum()) >= 52
    assert global_mean_pool(test.x, test.batch).abs().max() < 1e-5


class Conv(MessagePassing):
    def __init__(self, aggr):
        super().__init__(aggr=aggr)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j


def test_neighbours_are_a_set_too():
    x, edges = torch.randn(10, 8), torch.randint(0, 10, (2, 30))
    z = Conv(UMBCAggregation(8, num_slots=2)).eval()(x, edges)
    assert z.shape == (10, 16)
    mean = Conv(DeepSetsAggregation("mean"))(x, edges)
    torch.testing.assert_close(mean, Conv("mean")(x, edges), atol=1e-6, rtol=1e-5)


def test_gradients_against_float64_differences():
    aggregate = UMBCAggregation(3, num_slots=2).double().eval()
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([2, 0, 2, 0, 0, 2, 3])
    assert torch.autograd.gradcheck(lambda rows: aggregate(rows, index, dim_size=5), (x,))


def test_weights_are_drawn_anew():
    aggregate = UMBCAggregation(8, num_slots=2)
    before = aggregate.pool.key.weight.clone()
    aggregate.reset_parameters()
    assert not torch.equal(before, aggregate.pool.key.weight)


def test_what_is_wrong_is_said():
    aggregate = UMBCAggregation(8, num_slots=2)
    with pytest.raises(ShapeError, match="groups its first axis"):
        aggregate(torch.randn(2, 3, 8), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"one entry for each of the 3 rows of x; got \(2,\)"):
        aggregate(torch.randn(3, 8), torch.zeros(2, dtype=torch.int64), dim_size=1)
    with pytest.raises(ShapeError, match="index names group 4, but dim_size is 3"):
        aggregate(torch.randn(2, 8), torch.tensor([0, 4]), dim_size=3)
    with pytest.raises(ConfigurationError, match="got Linear"):
        PoolAggregation(torch.nn.Linear(2, 2))
