"""`python -m tests.fuzz [--count N] [--seconds S]`: attack every target; exit 1 if anything went wrong."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.fuzz.children import Outcome, attack
from tests.fuzz.server import attack_server
from tests.fuzz.targets import TARGETS

MOST_MEMORY = 2**30
#: Of the inputs, how many go to each target.
SHARES = {"bodies": 0.35, "states": 0.3, "files": 0.1, "configs": 0.05, "server": 0.2}


def main() -> int:
    """Attack all targets."""
    parser = argparse.ArgumentParser(description="Damaged and hostile input, by the ten thousand, on this machine alone.")
    parser.add_argument("--count", type=int, default=110_000, help="damaged inputs, over all targets")
    parser.add_argument("--seconds", type=float, default=3600.0, help="at most so long, over all targets")
    options = parser.parse_args()
    failed = False
    print(f"{'target':10}{'inputs':>10}{'wrong':>8}{'slowest':>12}{'memory':>12}   what became of them")
    for name, share in SHARES.items():
        count, seconds = round(options.count * share), options.seconds * share
        if name in TARGETS:
            outcome: Outcome = attack(name, count, seconds)
        else:
            with tempfile.TemporaryDirectory() as folder:
                outcome = attack_server(Path(folder), count, seconds)
        said = ", ".join(f"{kind} {times:,}" for kind, times in outcome.became.most_common(8))
        size = f"{outcome.memory / 2**20:,.0f} MiB"
        print(f"{name:10}{outcome.inputs:10,}{len(outcome.wrong):8,}{outcome.slowest:10.2f} s{size:>12}   {said}", flush=True)
        for line in outcome.wrong[:20]:
            print("   ", line)
        failed |= bool(outcome.wrong) or outcome.memory > MOST_MEMORY
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
