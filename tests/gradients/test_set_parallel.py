"""Set parallelism under torchrun with gloo: 2 and 4 ranks give the single process's gradients; a dead rank gives an error."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "set_parallel_worker.py"


def torchrun(ranks, *arguments, timeout=240):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(WORKER),
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=WORKER.parent.parent.parent)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_agree_with_one_process(ranks):
    done = torchrun(ranks)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "set parallel: all equal" in done.stdout


def test_every_mode_works_under_ddp():
    done = torchrun(2, "ddp")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "data parallel: all equal" in done.stdout


def test_a_dead_rank_is_an_error_and_not_a_hang():
    start = time.monotonic()
    done = torchrun(2, "die", timeout=120)
    assert done.returncode != 0
    assert time.monotonic() - start < 90
