"""Bulk encoding: all engines agree, killed jobs go on, states are kept and added to."""

import os
import random
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import setstream as ss
from setstream.bulk import encode as bulk
from setstream.bulk.encode import encode_sets
from setstream.cli.commands import app
from setstream.data import ArraySource, ParquetSets, SetDataset, dataset
from setstream.errors import ConfigurationError, DataError, MismatchError
from setstream.tasks.clustering import Clustering
from setstream.tasks.loading import open_model
from setstream.training import TrainConfig, Trainer
from tests.bulk.builders import SIZES, arrays, assert_right, bad_files, files, make, rows_of, write_bad_table, write_table
from tests.kills import kill_after


def test_files_to_parquet(tmp_path):
    assert encode_sets(make(), files(), tmp_path / "out.parquet", chunk_size=32) == 5
    assert_right(rows_of(tmp_path / "out.parquet"))
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]  # the journal is gone


def test_a_table_with_scattered_sets(tmp_path):
    table = write_table(tmp_path / "table")
    assert encode_sets(make(), table, tmp_path / "out.parquet", chunk_size=32) == 4
    assert_right(rows_of(tmp_path / "out.parquet"), ("a", "b", "d", "e"))


def test_hdf5_output(tmp_path):
    encode_sets(make(), files(), tmp_path / "out.h5")
    with h5py.File(tmp_path / "out.h5") as file:
        rows = {
            name.decode(): {"count": file["count"][i], "z": file["z"][i], "y": file["y"][i]}
            for i, name in enumerate(file["id"])
        }
    assert_right(rows)


def test_states_are_kept_and_tomorrows_elements_added(tmp_path):
    whole = arrays()
    today = SetDataset([ArraySource(whole[name][:20], id=name) for name in ("a", "d")])
    encode_sets(make(), today, tmp_path / "today.parquet", states=tmp_path / "today.db")
    tomorrow = SetDataset([ArraySource(whole["a"][20:], id="a"), ArraySource(whole["e"], id="e")])
    out, states = tmp_path / "tomorrow.parquet", tmp_path / "tomorrow.db"
    assert encode_sets(make(), tomorrow, out, update=tmp_path / "today.db", states=states) == 3
    rows = rows_of(out)
    assert {name: rows[name]["count"] for name in rows} == {"a": 300, "e": 120, "d": 20}
    z = make().encoder([whole["a"]])
    np.testing.assert_allclose(rows["a"]["z"], z.flatten().detach().numpy(), rtol=1e-4, atol=1e-5)
    with ss.StateStore(states, make()) as store:
        assert store.count("a") == 300
    with ss.StateStore(tmp_path / "today.db", make()) as store:
        assert store.count("a") == 20  # only read


@pytest.fixture
def every_set(monkeypatch):
    """Work is committed after every set, or every batch of a table, as if it were large."""
    monkeypatch.setattr(bulk, "COMMIT_SECONDS", 0)
    monkeypatch.setattr(dataset, "MOST_SETS", 1)


@pytest.mark.usefixtures("every_set")
def test_a_journal_of_another_job_is_not_mixed_in(tmp_path):
    class Stop(Exception):
        pass

    def stop(elements, sets):
        if sets == 2:
            raise Stop

    with pytest.raises(Stop):
        encode_sets(make(), files(), tmp_path / "out.parquet", progress=stop)
    other = SetDataset([ArraySource(x[:-1], id=name) for name, x in arrays().items() if len(x)])
    for model, data, options in ((make(seed=1), files(), {}), (make(), other, {}), (make(), files(), {"engine": "ray"})):
        with pytest.raises(ConfigurationError, match="journal of another run"):
            encode_sets(model, data, tmp_path / "out.parquet", **options)
    seen = []
    encode_sets(make(), files(), tmp_path / "out.parquet", progress=lambda elements, sets: seen.append(sets))
    assert min(seen) >= 2  # what was done is not done again
    assert_right(rows_of(tmp_path / "out.parquet"))


def test_sets_that_cannot_be_read_are_left_out_on_request_and_named(tmp_path):
    bad = arrays()["d"].clone()
    bad[3] = float("nan")
    data = SetDataset([ArraySource(arrays()["a"], id="a"), ArraySource(bad, id="nan"), ArraySource(arrays()["e"], id="e")])
    with pytest.raises(DataError, match="set 'nan': 1 of 47 elements hold NaN"):
        encode_sets(make(), data, tmp_path / "out.parquet")
    problems = []
    assert encode_sets(make(), data, tmp_path / "out.parquet", on_bad=problems.append) == 2
    assert "set 'nan': 1 of 47" in problems[0]
    assert_right(rows_of(tmp_path / "out.parquet"), ("a", "e"))


def test_memory_of_a_table_does_not_hold_all_states(tmp_path, monkeypatch):
    monkeypatch.setattr(bulk, "COMMIT_BYTES", 1)
    table = write_table(tmp_path / "table")
    encode_sets(make(), table, tmp_path / "out.parquet", chunk_size=32)
    assert_right(rows_of(tmp_path / "out.parquet"), ("a", "b", "d", "e"))


def test_a_head_that_gives_one_number_a_set_is_written(tmp_path):
    class Mean(nn.Module):
        def forward(self, z):
            return z.mean((1, 2))

    encode_sets(ss.SetModel(make().encoder, Mean()).eval(), files(), tmp_path / "out.parquet")
    assert len(rows_of(tmp_path / "out.parquet")["a"]["y"]) == 1


def test_options_that_cannot_be(tmp_path):
    for options, message in (
        ({"out": tmp_path / "a.txt"}, "must be a .parquet or .h5 file"),
        ({"what": "everything"}, "unknown what"),
        ({"engine": "spark"}, "unknown engine"),
        ({"update": tmp_path / "none.db"}, "no store of earlier states"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            encode_sets(make(), files(), **({"out": tmp_path / "out.parquet"} | options))
        for journal in tmp_path.glob(".*"):
            journal.unlink()
    with pytest.raises(ConfigurationError, match="training mode"):
        encode_sets(make().train(), files(), tmp_path / "out.parquet")
    with pytest.raises(ConfigurationError, match="makes no predictions"):
        encode_sets(make().encoder, files(), tmp_path / "out.parquet", what="predictions")
    with ss.StateStore(tmp_path / "s.db", make(seed=3)):
        pass
    with pytest.raises(MismatchError):
        encode_sets(make(), files(), tmp_path / "other.parquet", update=tmp_path / "s.db")


def kill_encoding(folder, kills, table, passes, seed):
    """Encode, killed again and again at random moments; then to the end. Gives the number of kills at work."""
    rng = random.Random(seed)
    killed, model, data = 0, make(passes=passes), table or files()

    def work(tick):
        tick()
        encode_sets(model, data, folder / "out.parquet", chunk_size=3, progress=lambda elements, done: tick())

    for _ in range(kills):
        if (folder / "out.parquet").exists():
            break
        killed += kill_after(work, ticks=rng.randrange(6 if table is None else 4), lines=rng.randrange(1000))
    encode_sets(model, data, folder / "out.parquet", chunk_size=3)
    return killed


@pytest.mark.usefixtures("every_set")
@pytest.mark.parametrize(("kind", "passes"), [("files", 1), ("table", 1), ("files", 3), ("table", 2)])
@pytest.mark.parametrize("wanted", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_jobs_go_on_with_no_row_missing_or_doubled(tmp_path, kind, passes, wanted):
    table = write_table(tmp_path / "table") if kind == "table" else None
    killed = repeat = 0
    while killed < wanted:
        folder = tmp_path / str(repeat)
        folder.mkdir()
        killed += kill_encoding(folder, 10 * passes, table, passes, seed=repeat)
        rows = pq.read_table(folder / "out.parquet").to_pylist()
        assert len(rows) == len({row["id"] for row in rows})
        assert_right({row["id"]: row for row in rows}, ("a", "b", "d", "e") if table else tuple(SIZES), passes)
        repeat += 1
    print(f"{killed} kills in {repeat} jobs")


@pytest.mark.usefixtures("every_set")
@pytest.mark.parametrize("kind", ["files", "table"])
def test_several_passes_read_the_data_once_each_and_a_stopped_job_goes_on_in_its_pass(tmp_path, kind):
    class Stop(Exception):
        pass

    data = files() if kind == "files" else write_table(tmp_path / "table")
    total, elements, seen = data.total(), sum(SIZES.values()), []

    def stop(elements, done):
        if done > total:  # in the second pass
            raise Stop

    model = make(passes=3)
    encode_sets(model, data, tmp_path / "whole.parquet", progress=lambda *done: seen.append(done))
    assert seen[-1] == (3 * elements, 3 * total)
    with pytest.raises(Stop):
        encode_sets(model, data, tmp_path / "out.parquet", progress=stop)
    seen.clear()
    encode_sets(model, data, tmp_path / "out.parquet", progress=lambda *done: seen.append(done))
    assert seen[0][1] > total
    assert 1 * elements < seen[-1][0] < 2 * elements
    for name in ("whole", "out"):
        assert_right(rows_of(tmp_path / f"{name}.parquet"), data.ids if kind == "files" else data.ids(), passes=3)


def test_bad_sets_are_left_out_of_all_passes_and_no_store_keeps_several(tmp_path):
    table, problems = write_bad_table(tmp_path / "table"), []
    assert encode_sets(make(passes=2), table, tmp_path / "out.parquet", on_bad=problems.append) == 1
    assert len(problems) == 3
    assert_right(rows_of(tmp_path / "out.parquet"), ("a",), passes=2)
    huge = SetDataset([ArraySource(x, id=name) for name, x in (("a", arrays()["a"]), ("huge", torch.full((5, 4), 1e38)))])
    problems.clear()
    assert encode_sets(make(passes=2), huge, tmp_path / "huge.parquet", on_bad=problems.append) == 1
    assert "set 'huge': its elements are finite, and too large" in problems[0]
    with pytest.raises(DataError, match="'huge'"):
        encode_sets(make(), huge, tmp_path / "once.parquet")
    with pytest.raises(ConfigurationError, match="reads its sets 2 times"):
        encode_sets(make(passes=2), files(), tmp_path / "o.parquet", states=tmp_path / "states.db")


def test_the_command_line_encodes(tmp_path):
    config = TrainConfig("clustering", "umbc+set-transformer", {"points": 32, "test_sets": 4}, steps=1, tensorboard=False)
    Trainer(Clustering(points=32, test_sets=4), config, tmp_path / "run", shown=False).run()
    data = tmp_path / "data"
    data.mkdir()
    for name, size in (("x", 50), ("y", 0), ("z", 7)):
        np.save(data / f"{name}.npy", np.random.default_rng(0).standard_normal((size, 2)).astype(np.float32))
    (data / "bad.npy").write_bytes(b"junk")
    command = [
        sys.executable,
        "-m",
        "setstream.cli",
        "encode",
        str(tmp_path / "run"),
        str(data),
        "--out",
        str(tmp_path / "o.parquet"),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1
    assert "bad.npy" in done.stderr
    done = subprocess.run([*command, "--skip-bad"], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert "skipped" in done.stdout
    assert "3 sets, 1 skipped" in done.stdout
    rows = rows_of(tmp_path / "o.parquet")
    assert {name: row["count"] for name, row in rows.items()} == {"x": 50, "y": 0, "z": 7}
    assert len(rows["x"]["y"]) == 4 + 8 + 8  # weights, means and scales of four components
    events = {"set_id": ["x", "y", "x"], "f0": [0.1, 0.2, 0.3], "f1": [0.4, 0.5, 0.6], "when": [10, 70, 130]}
    pq.write_table(pa.table(events), tmp_path / "events.parquet")
    options = {"columns": "f0,f1", "time": "when", "tile": 60.0, "states": tmp_path / "tiles.db", "device": "cpu"}
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    words = ["encode", tmp_path / "run", tmp_path / "events.parquet", "--out", tmp_path / "t.parquet", *flags]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    with ss.StateStore(tmp_path / "tiles.db", open_model(str(tmp_path / "run"))) as store:
        assert [int(store.get("x", since=since, until=since + 60).count) for since in (0, 60, 120)] == [1, 0, 1]


def test_two_ranks_agree_with_the_local_engine(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(
        "import torch, torch.distributed as dist, setstream as ss\n"
        "from tests.bulk.builders import arrays, make\n"
        "dist.init_process_group('gloo')\n"
        "sets = list(arrays().values())\n"
        "mine = ss.scatter_sets(sets)\n"
        "z = ss.encode(make().encoder, mine, gradient='none', group=dist.group.WORLD)\n"
        f"torch.save(z, {str(tmp_path)!r} + f'/z{{dist.get_rank()}}.pt')\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    root = str(Path(__file__).parent.parent.parent)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(launch, capture_output=True, text=True, timeout=120, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr[-2000:]
    encode_sets(make(), files(), tmp_path / "local.parquet")
    rows = rows_of(tmp_path / "local.parquet")
    for rank in (0, 1):
        z = torch.load(tmp_path / f"z{rank}.pt")
        for own, name in zip(z, SIZES, strict=True):
            np.testing.assert_allclose(rows[name]["z"], own.flatten().numpy(), rtol=1e-4, atol=1e-5)


# -- sets that are left out -------------------------------------------------------------------------------------------


def test_bad_sets_of_a_table_are_left_out_on_request_and_named(tmp_path):
    table = write_bad_table(tmp_path / "table")
    with pytest.raises(DataError, match=r"3\.parquet: cannot be read"):
        encode_sets(make(), table, tmp_path / "out.parquet")
    with pytest.raises(DataError, match=r"1\.parquet, row group 1, set 'd': 1 of 23 elements hold NaN"):
        encode_sets(make(), ParquetSets(tmp_path / "table" / "1.parquet"), tmp_path / "other.parquet")
    problems = []
    assert encode_sets(make(), table, tmp_path / "out.parquet", on_bad=problems.append) == 1
    assert_right(rows_of(tmp_path / "out.parquet"), ("a",))
    assert len(problems) == 3
    assert any("3.parquet" in text and "none of its rows are used" in text for text in problems)
    assert any("1.parquet, row group 1, set 'd'" in text and "NaN" in text for text in problems)
    assert any("set 'e'" in text and "2.parquet, row group 1" in text for text in problems)


def test_rows_of_unknown_sets_are_reported_with_their_place(tmp_path):
    """The column of ids is damaged, too: which sets lack rows cannot be known, where they lay can."""
    table = write_bad_table(tmp_path / "table")
    path = tmp_path / "table" / "2.parquet"
    content = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).dictionary_page_offset
    content[start : start + 8] = b"\xff" * 8
    path.write_bytes(content)
    problems = []
    assert encode_sets(make(), table, tmp_path / "out.parquet", on_bad=problems.append) == 2
    assert rows_of(tmp_path / "out.parquet")["e"]["count"] == 60  # what is there
    assert any("2.parquet, row group 1" in text and "sets with rows there lack them" in text for text in problems)


@pytest.mark.usefixtures("every_set")
@pytest.mark.parametrize("kind", ["files", "table"])
def test_a_job_that_goes_on_remembers_what_was_left_out(tmp_path, kind):
    class Stop(Exception):
        pass

    def stop(elements, done):
        if done >= (347 if kind == "table" else 2):
            raise Stop

    if kind == "table":
        write_bad_table(tmp_path / "table")
        for name in ("2", "3"):
            (tmp_path / "table" / f"{name}.parquet").unlink()
        more = pa.FixedSizeListArray.from_arrays(pa.array(arrays()["e"].numpy().ravel()), 4)
        pq.write_table(pa.table({"set_id": ["e"] * 120, "features": more}), tmp_path / "table" / "9.parquet", row_group_size=60)
        data = ParquetSets(tmp_path / "table")
    else:
        data = SetDataset([*bad_files().sources, ArraySource(arrays()["e"], id="e")])
    first, second = [], []
    with pytest.raises(Stop):
        encode_sets(make(), data, tmp_path / "out.parquet", on_bad=first.append, progress=stop)
    assert len(first) == 1
    with pytest.raises(DataError, match=r"an earlier run left out sets, like: .*NaN.*--skip-bad"):
        encode_sets(make(), data, tmp_path / "out.parquet")
    assert encode_sets(make(), data, tmp_path / "out.parquet", on_bad=second.append) == 2
    assert second == first
    assert_right(rows_of(tmp_path / "out.parquet"), ("a", "e"))


def test_a_set_without_a_finite_encoding_does_not_stop_the_others(tmp_path):
    """Finite elements whose sum is not: known only when the set is finalised."""
    encoder = ss.SetEncoder(nn.Identity(), ss.DeepSets("sum")).eval()
    data = SetDataset([ArraySource(torch.full((5, 2), size), id=name) for name, size in (("good", 1.0), ("huge", 1e38))])
    with pytest.raises(DataError, match="set 'huge'"):
        encode_sets(encoder, data, tmp_path / "a.parquet", what="representations")
    problems, states = [], tmp_path / "states.db"
    options = {"what": "representations", "on_bad": problems.append}
    assert encode_sets(encoder, data, tmp_path / "b.parquet", states=states, **options) == 1
    assert len(problems) == 1
    assert "set 'huge'" in problems[0]
    with ss.StateStore(states, encoder) as store:
        assert store.ids() == ["good"]


# -- times --------------------------------------------------------------------------------------------------------------


def write_events(folder, kind):
    """Events of three sets over some days, in two files; in several sizes of row groups."""
    rng, rows = np.random.default_rng(0), 400
    names, x = rng.choice(["a b", "b", "c"], rows), rng.standard_normal((rows, 4)).astype(np.float32)
    seconds = rng.integers(-5 * 3600, 90 * 3600, rows) + (0.5 if kind == "float" else 0)
    times = pa.array(seconds * 10**6, pa.timestamp("us", "UTC")) if kind == "timestamp" else pa.array(seconds)
    table = pa.table({"set_id": names, "time": times} | {f"f{column}": x[:, column] for column in range(4)})
    folder.mkdir()
    for number in range(2):
        pq.write_table(table.slice(200 * number, 200), folder / f"{number}.parquet", row_group_size=70)
    return ParquetSets(folder, time_column="time"), names, torch.from_numpy(x), torch.from_numpy(seconds)


@pytest.mark.usefixtures("every_set", "without_cluster")
@pytest.mark.parametrize(("kind", "engine"), [("integer", "local"), ("float", "ray"), ("timestamp", "local")])
def test_a_time_column_gives_the_tiles_of_a_store_that_is_updated_with_times(tmp_path, kind, engine):
    data, names, x, seconds = write_events(tmp_path / "events", kind)
    assert data.columns == ["f0", "f1", "f2", "f3"]
    options = {"tile": 3600, "states": tmp_path / "states.db", "engine": engine, "chunk_size": 32}
    assert encode_sets(make(), data, tmp_path / "out.parquet", **options) == 3
    rows = rows_of(tmp_path / "out.parquet")
    with ss.StateStore(tmp_path / "states.db", make()) as store, ss.StateStore(tmp_path / "b.db", make(), tile=3600) as other:
        for name in sorted(set(names)):
            own = torch.from_numpy(names == name)
            other.update(name, x[own], time=seconds[own])
            z = make().encoder([x[own]]).flatten().detach().numpy()
            np.testing.assert_allclose(rows[name]["z"], z, rtol=1e-4, atol=1e-5)
            for since, until in ((None, None), (0, 3600), (-7200, 40 * 3600), (36 * 3600, None), (89 * 3600, 91 * 3600)):
                a, b = store.get(name, since=since, until=until), other.get(name, since=since, until=until)
                assert int(a.count) == int(b.count)
                torch.testing.assert_close(store.finalize(a), other.finalize(b), rtol=1e-4, atol=1e-5)
        everything = "SELECT id, level, tile, count FROM tiles ORDER BY id, level, tile"
        assert store.rows.query(everything) == other.rows.query(everything)


def test_times_and_tiles_come_together(tmp_path):
    data = write_events(tmp_path / "events", "float")[0]
    states, out = tmp_path / "states.db", tmp_path / "out.parquet"
    for options, table in (({}, data), ({"tile": 60, "states": states}, files())):
        with pytest.raises(ConfigurationError, match="tiles need the time of each element"):
            encode_sets(make(), table, out, **options)
    with pytest.raises(ConfigurationError, match="tile= is for a new store"):
        encode_sets(make(), data, out, tile=60)
    with pytest.raises(DataError, match="no column of times 'when'"):
        ParquetSets(tmp_path / "events", time_column="when")
    bad = pa.table({"set_id": ["a", "b"], "f0": [0.0, 1.0], "time": [1.0, float("nan")]})
    pq.write_table(bad, tmp_path / "bad.parquet")
    with pytest.raises(DataError, match="'time' holds NaN"):
        table = ParquetSets(tmp_path / "bad.parquet", time_column="time")
        encode_sets(make(), table, out, tile=60, states=states)
