"""Training on sets on disk over two processes: the weights of one process, and each process reads its share only."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from setstream.data import ArraySource, SetDataset, SetLoader
from setstream.errors import ConfigurationError
from tests.training import disk_worker
from tests.training.disk_worker import KINDS, SIZES


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Everything by one process, here; then everything by two, in one launch of torchrun."""
    folder = tmp_path_factory.mktemp("disk")
    data, one, two = folder / "data", folder / "one", folder / "two"
    for place in (data, one, two):
        place.mkdir()
    for number, size in enumerate(SIZES):
        np.save(data / f"{number}.npy", np.random.default_rng(number).standard_normal((size, 5)).astype(np.float32))
    alone = {kind: (disk_worker.train(data, one / kind, kind, "set"), list(disk_worker.READ)) for kind in KINDS}
    alone["loader"] = (*disk_worker.loader_gradients(data, None), list(disk_worker.READ))
    # A run that one process brought to step 2 is to be ended by two.
    shutil.copytree(one / "sources", two / "resumed")
    for name in ("result.json", "model.safetensors"):
        (two / "resumed" / name).unlink()
    shutil.rmtree(two / "resumed" / "checkpoints" / "step-00000004")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    root = str(Path(__file__).parent.parent.parent)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    script = [str(Path(disk_worker.__file__)), str(data), str(two)]
    done = subprocess.run([*launch, *script], capture_output=True, text=True, timeout=300, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    return alone, [torch.load(two / f"rank{rank}.pt") for rank in (0, 1)]


def assert_close(weights, expected):
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parallel", ["data", "set"])
def test_two_processes_end_with_the_weights_of_one(runs, kind, parallel):
    alone, ranks = runs
    for rank in ranks:
        assert_close(rank[kind, parallel][0], alone[kind][0])


@pytest.mark.parametrize("kind", ["sources", "chunks"])
@pytest.mark.parametrize("parallel", ["data", "set"])
def test_each_process_reads_its_share_only(runs, kind, parallel):
    """Together they read what one process reads; not twice as much. A first chunk may be read again, to learn its shape."""
    alone, ranks = runs
    mine, theirs = (Counter(rank[kind, parallel][1]) for rank in ranks)
    expected = Counter(alone[kind][1])
    assert mine.keys() | theirs.keys() == expected.keys()
    assert mine.total() + theirs.total() == pytest.approx(expected.total(), rel=0.25)
    if parallel == "set":  # a part of every set: never the same element
        assert not mine.keys() & theirs.keys()
        assert {place.split(":")[0] for place in mine} == {place.split(":")[0] for place in theirs}


def test_a_run_goes_on_with_another_number_of_processes(runs):
    alone, ranks = runs
    for rank in ranks:
        assert_close(rank["resumed"][0], alone["sources"][0])


def test_the_loader_shares_sets_or_their_elements(runs):
    (expected, ids, read), ranks = runs[0]["loader"], runs[1]
    by_sets = [rank["loader", "data"] for rank in ranks]
    assert sorted(by_sets[0][1] + by_sets[1][1]) == sorted(ids)
    assert not set(by_sets[0][2]) & set(by_sets[1][2])
    assert set(by_sets[0][2]) | set(by_sets[1][2]) == set(read)
    for mine, theirs, whole in zip(by_sets[0][0], by_sets[1][0], expected, strict=True):
        torch.testing.assert_close(mine + theirs, whole, rtol=1e-4, atol=1e-5)
    by_elements = [rank["loader", "set"] for rank in ranks]
    assert not set(by_elements[0][2]) & set(by_elements[1][2])
    for rank in by_elements:
        assert rank[1] == ids
        for gradient, whole in zip(rank[0], expected, strict=True):
            torch.testing.assert_close(gradient, whole, rtol=1e-4, atol=1e-5)


def test_the_loader_alone_gives_everything():
    data = SetDataset([ArraySource(torch.zeros(3, 2), id=str(number)) for number in range(5)])
    for parallel in (None, "data", "set"):
        loader = SetLoader(data, 2, parallel=parallel)
        assert [batch.ids for batch in loader] == [["0", "1"], ["2", "3"], ["4"]]
        assert len(loader) == 3
    with pytest.raises(ConfigurationError, match="parallel must be 'data', 'set' or None"):
        SetLoader(data, 2, parallel="both")
