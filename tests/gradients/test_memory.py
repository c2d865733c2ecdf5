"""Constant memory, measured on fresh processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, torch, setstream as ss
from torch import nn

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))

torch.set_num_threads(1)
elements, chunk = int(sys.argv[1]), 4096
encoder = ss.SetEncoder(nn.Sequential(nn.Linear(128, 128), nn.ReLU()), ss.UMBC(128, 64, heads=4)).eval()
x = torch.randn(1, chunk, 128)
state, seen, early, late = None, 0, 0, 0  # peaks of the first 10^5 elements, and of all after them
with torch.no_grad():
    while seen < elements:
        state = encoder.update(state, x + seen / elements)
        seen += chunk
        early, late = (max(early, resident()), late) if seen <= 100_000 else (early, max(late, resident()))
assert int(state.count) == seen
assert torch.isfinite(encoder.finalize(state)).all()
print(early, late, late / early)
"""


def growth(elements):
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(elements)], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_stream_of_a_million_elements_keeps_memory_flat():
    assert growth(10**6) < 1.05


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_stream_of_ten_million_elements_keeps_memory_flat():
    assert growth(10**7) < 1.05


def peak_of_a_step(mode, size):
    """MiB, from benchmarks/memory.py: the largest resident memory of a process that makes training steps on one set."""
    script = Path(__file__).parents[2] / "benchmarks" / "memory.py"
    command = [sys.executable, str(script), "--worker", mode, str(size), "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["peak"]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("mode", ["two-passes", "ab-mil", "ds-mil"])
def test_a_training_step_keeps_memory_flat(mode):
    """`exact` on sets of 10^4 and 10^6 elements from a source; what a step keeps of 10^6 elements at once is a gigabyte."""
    assert peak_of_a_step(mode, 10**6) < 1.15 * peak_of_a_step(mode, 10**4)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("mode", ["ab-mil-whole", "ds-mil-whole"])
def test_a_training_step_of_a_whole_bag_module_does_not(mode):
    assert peak_of_a_step(mode, 10**5) > 1.5 * peak_of_a_step(mode, 10**4)
