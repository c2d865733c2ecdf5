"""A pool that is not consistent takes a set in one chunk, at every door, unless the caller says chunks="average"."""

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import setstream as ss
from setstream.bulk.encode import encode_sets
from setstream.cli.commands import app
from setstream.data import ArraySource, SourceChunks
from setstream.errors import ConfigurationError, ConsistencyError
from setstream.tasks.clustering import Clustering
from setstream.tasks.mil import Mil
from setstream.tasks.mil.models import MODELS, BagHead
from setstream.tasks.mil.task import Bags
from setstream.training import TrainConfig, Trainer

WIDTH = 3


class BothStreams(nn.Module):
    """DS-MIL's two logits, (B, 2), of a whole bag."""

    def __init__(self, dim):
        super().__init__()
        self.dsmil = ss.nn.DSMIL(dim)

    def forward(self, x, mask=None):
        return torch.cat(self.dsmil.streams(x, mask)[:2], dim=1)


def whole_bag(in_dim=WIDTH):
    """The model ds-mil of 0.1, which needs its whole bag."""
    phi = nn.Sequential(nn.Linear(in_dim, 8), nn.ReLU())
    return ss.SetModel(ss.SetEncoder(phi, ss.ChunkMean(BothStreams(8), 8)), BagHead(nn.Identity()))


class WholeBags(Mil):
    models = MODELS | {"whole-bag": whole_bag}


def make(train=False):
    return whole_bag().train(train)


@pytest.fixture
def model():
    return make()


@pytest.fixture
def x():
    return torch.randn(2, 20, WIDTH)


def averaged(model, x, size):
    return model.head(torch.stack([model.encoder(chunk) for chunk in x.split(size, dim=1)]).mean(0))


@pytest.mark.parametrize("gradient", ["none", "exact", "unbiased", "importance"])
@pytest.mark.parametrize("served", [False, True])
def test_encode(x, gradient, served):
    model = make(train=True)
    given = ss.Chunks(x.split(7, dim=1)) if served else x
    with pytest.raises(ConsistencyError, match=r"more than one chunk.*chunks='average'"):
        ss.encode(model.encoder, given, chunk_size=7, gradient=gradient)
    model.eval()
    z = ss.encode(model.encoder, given, chunk_size=7, gradient=gradient, chunks="average")
    torch.testing.assert_close(model.head(z), averaged(model, x, 7))
    whole = ss.encode(model.encoder, ss.Chunks([x]) if served else x, chunk_size=20, gradient=gradient)
    torch.testing.assert_close(whole, model.encoder(x))


def test_encode_in_one_piece(model, x):
    torch.testing.assert_close(ss.encode(model.encoder, x, chunk_size=7, gradient="full"), model.encoder(x))
    assert ss.encode(model.encoder, x, chunk_size=7, gradient="subset").shape == (2, 2)
    with torch.no_grad():
        torch.testing.assert_close(ss.encode(model.encoder, x, chunk_size=7, gradient="full"), model.encoder(x))
        with pytest.raises(ConsistencyError):
            ss.encode(model.encoder, x, chunk_size=7)
    given = [[[0, 1, 2], list(range(3, 20))]] * 2
    with pytest.raises(ConsistencyError):
        ss.encode(model.encoder, x, chunk_size=20, gradient="exact", partition=given)


def test_only_average_is_known(model, x):
    with pytest.raises(ConfigurationError, match="'average'"):
        ss.encode(model.encoder, x, chunks="mean")


def test_stream(model, x):
    stream = model.stream()
    stream.update(x[:, :12])
    with pytest.raises(ConsistencyError):
        stream.update(x[:, 12:])
    torch.testing.assert_close(stream.predict(), model(x[:, :12]))  # nothing was lost, nothing was added
    other = model.stream()
    other.update(x[:, 12:])
    with pytest.raises(ConsistencyError):
        stream.merge(other)
    average = model.stream(chunks="average")
    for chunk in x.split(10, dim=1):
        average.update(chunk)
    torch.testing.assert_close(average.predict(), averaged(model, x, 10))


def test_states_that_were_added_by_hand(model, x):
    a, b = (model.encoder.update(None, chunk) for chunk in x.split(10, dim=1))
    with pytest.raises(ConsistencyError):
        model.encoder.finalize(a + b)
    with pytest.raises(ConsistencyError):
        model.encoder.merge(a, b)
    again = ss.State.from_bytes((a + b).to_bytes())
    with pytest.raises(ConsistencyError):
        model.finalize(again)
    torch.testing.assert_close(model.finalize(a + b, chunks="average"), averaged(model, x, 10))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda pool: ss.Parallel(top=ss.DeepSets("max"), bag=pool),
        lambda pool: ss.Projected(nn.Linear(8, 8), pool),
    ],
)
def test_inside_other_pools(x, wrap):
    encoder = ss.SetEncoder(nn.Linear(WIDTH, 8), wrap(ss.ChunkMean(ss.nn.SetTransformer(8)))).eval()
    a, b = (encoder.update(None, chunk) for chunk in x.split(10, dim=1))
    encoder.finalize(a)
    with pytest.raises(ConsistencyError):
        encoder.finalize(a + b)
    with pytest.raises(ConsistencyError):
        encoder.update(a, x[:, 10:])


def test_store(model, x, tmp_path):
    with ss.StateStore(tmp_path / "states.db", model) as store:
        store.update("a", x[0, :12])
        with pytest.raises(ConsistencyError):
            store.update("a", x[0, 12:])
        assert store.count("a") == 12
        store.update("b", x[0, 12:])
        with pytest.raises(ConsistencyError):
            store.merge("a", "b")
        torch.testing.assert_close(store.predict("a"), model(x[:1, :12]).detach())
    with ss.StateStore(tmp_path / "states.db", model, chunks="average") as store:
        assert store.merge("a", "b") == 20
        assert store.predict("a").shape == (1, 2)
    with ss.StateStore(tmp_path / "states.db", model) as store, pytest.raises(ConsistencyError):
        store.predict("a")


def test_compiled_verbs(model, x):
    with pytest.raises(ConsistencyError):
        ss.pure.empty(model.encoder, 2, x[0])
    assert ss.pure.empty(model.encoder, 2, x[0], chunks="average")


@pytest.fixture
def files(tmp_path):
    (tmp_path / "bags").mkdir()
    for name in "ab":
        np.save(tmp_path / "bags" / f"{name}.npy", np.random.default_rng(ord(name)).normal(size=(20, WIDTH)).astype("f4"))
    return tmp_path / "bags"


def test_bulk(model, files, tmp_path):
    with pytest.raises(ConsistencyError):
        encode_sets(model, ss.data.open(files), tmp_path / "rows.parquet", chunk_size=7)
    with pytest.raises(ConsistencyError):
        encode_sets(model, ss.data.open(files), tmp_path / "ray.parquet", engine="ray")
    assert encode_sets(model, ss.data.open(files), tmp_path / "whole.parquet", chunk_size=20) == 2
    assert encode_sets(model, ss.data.open(files), tmp_path / "mean.parquet", chunk_size=7, chunks="average") == 2


def test_bulk_of_a_table(model, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    values = np.random.default_rng(0).normal(size=(20, WIDTH)).astype("f4")
    table = arrow.table({"id": ["a"] * 20, "x": arrow.FixedSizeListArray.from_arrays(values.ravel(), WIDTH)})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=10)
    data = ss.data.ParquetSets(tmp_path / "rows.parquet")
    for size in (7, 10, 1000):  # cut by us, or by the file's row groups
        with pytest.raises(ConsistencyError):
            encode_sets(model, data, tmp_path / f"{size}.parquet", chunk_size=size)


def test_command_line(model, files, tmp_path):
    model.save_pretrained(tmp_path / "model", builder=whole_bag, options={"in_dim": WIDTH})
    out = tmp_path / "rows.parquet"
    words = ["encode", str(tmp_path / "model"), str(files), "--out", str(out)]
    words += ["--trust", f"{__name__}:whole_bag", "--chunk-size", "7"]
    ended = CliRunner().invoke(app, words)
    assert isinstance(ended.exception, ConsistencyError)
    assert CliRunner().invoke(app, [*words, "--chunks", "average"]).exit_code == 0
    out.unlink()
    assert CliRunner().invoke(app, [*words[:-1], "100"]).exit_code == 0
    rows = pytest.importorskip("pyarrow.parquet").read_table(out).to_pydict()
    bag = torch.from_numpy(np.load(files / "a.npy"))[None]
    torch.testing.assert_close(torch.tensor(rows["y"][0]), model(bag)[0].detach())


def bags():
    drawn = [torch.randn(int(n), WIDTH) for n in torch.randint(12, 30, (16,))]
    return Bags(drawn, torch.tensor([0, 1] * 8))


def test_training(tmp_path):
    def trainer(name, **options):
        config = TrainConfig(task="mil", model="whole-bag", steps=2, batch=2, tensorboard=False, chunk_size=4, **options)
        return Trainer(WholeBags(bags=bags(), count=2), config, tmp_path / name, shown=False)

    for gradient in ("unbiased", "exact", "importance"):
        with pytest.raises(ConsistencyError, match="--gradient full"):
            trainer(gradient, gradient=gradient)
    assert trainer("full", gradient="full").run().done
    assert trainer("average", gradient="exact", chunks="average").run().done


def test_training_means_the_model_that_is_tested():
    """With `full`, the loss of training is the loss of whole bags, whatever chunk_size says."""
    from setstream.training.task import Encode

    task = WholeBags(bags=bags(), count=2)
    model = task.build("whole-bag").eval()
    batch = task.batch(0, 4, torch.Generator())
    small = task.loss(model, batch, Encode("full", chunk_size=4))
    torch.testing.assert_close(small, task.loss(model, batch, Encode("full", chunk_size=1000)))


def test_averages_that_tasks_report_are_asked_for():
    task = Clustering(points=32, test_points=32, test_sets=2)
    model = task.build("set-transformer").eval()
    assert {"nll", "nll_whole"} <= set(task.evaluate(model))


def sources(x):
    return [ArraySource(own, id=str(n)) for n, own in enumerate(x)]


@pytest.mark.parametrize("gradient", ["full", "exact", "unbiased", "importance", "none"])
@pytest.mark.parametrize("train", [False, True])
def test_sources_are_sets(gradient, train):
    encoder = ss.SetEncoder(nn.Linear(WIDTH, 8), ss.UMBC(8, num_slots=2)).train(train)
    x = [torch.randn(20, WIDTH), torch.randn(9, WIDTH)]
    expected = encoder(x)
    torch.testing.assert_close(ss.encode(encoder, sources(x), chunk_size=6, gradient=gradient), expected)
    torch.testing.assert_close(ss.encode(encoder, sources(x)[0], chunk_size=6, gradient=gradient), expected[:1])
    torch.testing.assert_close(ss.encode(encoder, tuple(sources(x)), chunk_size=6, gradient=gradient), expected)


def test_subset_of_sources_reads_no_more():
    encoder = ss.SetEncoder(nn.Identity(), ss.DeepSets("mean")).train()
    x = torch.eye(50)
    z = ss.encode(encoder, sources([x, x]), chunk_size=5, grad_chunks=2, gradient="subset")
    assert ((z * 10).round() == 1).sum(1).tolist() == [10, 10]  # ten elements of each, once


def test_exact_gradient_of_sources():
    encoder = ss.SetEncoder(nn.Linear(WIDTH, 8), ss.UMBC(8, num_slots=2))
    x = [torch.randn(20, WIDTH), torch.randn(9, WIDTH)]
    ways = (encoder(x), ss.encode(encoder, sources(x), chunk_size=6, gradient="exact"))
    ours = [torch.autograd.grad(z.square().sum(), list(encoder.parameters()), allow_unused=True) for z in ways]
    torch.testing.assert_close(ours[0], ours[1])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"gradient": "subset", "replacement": True}, "replacement"),
        ({"gradient": "exact", "replacement": True}, "replacement"),
        ({"gradient": "unbiased", "floor": 0.2}, "floor"),
        ({"gradient": "exact", "features": "recompute"}, "features"),
        ({"gradient": "none", "features": "cache"}, "features"),
    ],
)
def test_options_that_a_mode_ignores(options, name):
    encoder = ss.SetEncoder(nn.Linear(WIDTH, 8), ss.UMBC(8, num_slots=2))
    with pytest.raises(ConfigurationError, match=name):
        ss.encode(encoder, torch.randn(1, 20, WIDTH), **options)


def test_partition_of_a_source():
    encoder = ss.SetEncoder(nn.Linear(WIDTH, 8), ss.UMBC(8, num_slots=2))
    x = torch.randn(1, 20, WIDTH)
    for given in (ss.Chunks([x]), sources(x), SourceChunks(sources(x), 6)):
        with pytest.raises(ConfigurationError, match="partition"):
            ss.encode(encoder, given, partition="random")


def test_server(model, x, tmp_path):
    testclient = pytest.importorskip("fastapi.testclient")
    from setstream.serve import Options, create_app

    body = {"elements": x[0].tolist()}
    halves = [{"elements": x[0, :10].tolist()}, {"elements": x[0, 10:].tolist()}]
    for chunks, status in ((None, 409), ("average", 200)):
        app_ = create_app(ss.StateStore(tmp_path / f"{chunks}.db", model, chunks=chunks), Options(), "whole-bag")
        with testclient.TestClient(app_, "http://localhost") as client:
            client.post("/sets/whole/elements", json=body)
            said = client.get("/sets/whole/prediction").json()["prediction"]
            torch.testing.assert_close(torch.tensor(said), model(x[:1])[0].detach())
            first, second = (client.post("/sets/parts/elements", json=half) for half in halves)
            assert (first.status_code, second.status_code) == (200, status)
            assert client.get("/sets/parts").json()["count"] == (10 if chunks is None else 20)


# -- found by an attack on the repairs -----------------------------------------------------------------------------------


def test_decay_does_not_hide_that_a_set_came_in_chunks(model, x):
    a, b = (model.encoder.update(None, chunk) for chunk in x.split(10, dim=1))
    for state in ((a + b) * 0.5, a * 0.4 + b * 0.4, ss.State.from_bytes(((a + b) * 0.1).to_bytes())):
        with pytest.raises(ConsistencyError):
            model.finalize(state)
    torch.testing.assert_close(model.finalize(a * 0.5), model.finalize(a))


def test_a_mean_over_chunks_loses_no_elements(model, x):
    a, b = (model.encoder.update(None, chunk) for chunk in x.split(10, dim=1))
    with pytest.raises(ss.errors.RemovalError, match="their chunk is not known"):
        a + b - b


def test_verbs_for_compilers_know_it_too(model, x):
    tensors = ss.pure.to_tensors(model.encoder.update(None, x[:, :10]))
    with pytest.raises(ConsistencyError):
        ss.pure.update(model.encoder, tensors, x[:, 10:])
    with pytest.raises(ConsistencyError):
        ss.pure.merge(model.encoder, tensors, tensors)
