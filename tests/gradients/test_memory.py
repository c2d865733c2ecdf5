"""Constant memory, measured on a fresh process."""

import subprocess
import sys

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
