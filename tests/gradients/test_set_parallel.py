"""Set parallelism under torchrun with gloo: 2 and 4 ranks give the single process's gradients; a dead rank gives an error."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def torchrun(ranks, *arguments):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launch, "--module", "tests.gradients.set_parallel_worker", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)


@pytest.fixture(scope="module")
def two_ranks():
    """All that two ranks have to show, in one launch: most of its time is the import of torch."""
    return torchrun(2, "all")


@pytest.mark.parametrize("line", ["set parallel: all equal", "sampled: unbiased", "data parallel: all equal"])
@pytest.mark.xdist_group("two ranks")
def test_two_ranks_agree_with_one_process(two_ranks, line):
    assert line in two_ranks.stdout, two_ranks.stdout[-2000:] + two_ranks.stderr[-4000:]


@pytest.mark.xdist_group("two ranks")
def test_a_dead_rank_is_an_error_and_not_a_hang(two_ranks):
    assert "dead rank: error" in two_ranks.stdout, two_ranks.stdout[-2000:] + two_ranks.stderr[-4000:]
    assert two_ranks.returncode != 0


@pytest.mark.slow
def test_four_ranks_agree_with_one_process():
    done = torchrun(4)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "set parallel: all equal" in done.stdout
