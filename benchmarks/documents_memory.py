"""Memory and time of a training step on one long document, for every document model: each measurement in a fresh process.

    python benchmarks/documents_memory.py                                     1,000 and 100,000 words
    python benchmarks/documents_memory.py --models umbc+bert --sizes 1000 1000000
    python benchmarks/documents_memory.py --models umbc+anchors+bert --gradient importance --features recompute

A document of N random words, 50 labels, the pretrained minilm, AdamW. The models that see multisets of words train with 100
words that carry the gradient (--gradient); tobert and longformer hold a graph of the whole document, and read --largest-whole
words at most. Peak is the largest resident memory of the process, of which `before` was there after a step on 1,000 words.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from memory import peak_mib

from setstream.gradients.encode import encode
from setstream.tasks.documents.models import MODELS

LABELS, WARM = 50, 1000


def worker(name: str, size: int, bert: str, gradient: str, features: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = MODELS[name](labels=LABELS, bert=bert).train()
    words = model.encoder.phi.get_submodule("words").num_embeddings
    assert isinstance(words, int)
    gradient = gradient if model.encoder.pool.consistent else "full"
    optimizer = torch.optim.AdamW([own for own in model.parameters() if own.requires_grad], 5e-5)

    def step(n: int) -> tuple[float, float]:
        document, wall, process = torch.randint(words, (n,)), time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        z = encode(model.encoder, [document], chunk_size=100, gradient=gradient, features=features)
        logits = model.head(z)
        F.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits)).backward()
        optimizer.step()
        return time.perf_counter() - wall, time.process_time() - process

    step(WARM)  # libraries, thread pools and the optimizer's moments fill memory the first time
    before = peak_mib()
    wall, process = step(size)
    print(json.dumps({"gradient": gradient, "before": before, "peak": peak_mib(), "wall": wall, "process": process}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 100_000], help="words of the document")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), help="by name")
    parser.add_argument("--gradient", default="unbiased", help="of the models that see multisets")
    parser.add_argument("--features", default="cache", help="of importance: cache, recompute or a folder")
    parser.add_argument("--bert", default="minilm", help="the pretrained model: minilm, or a local folder")
    parser.add_argument("--largest-whole", type=int, default=4000, help="most words for tobert and longformer: some gigabytes")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker[0], int(options.worker[1]), options.bert, options.gradient, options.features)
        return
    print(
        "| model | gradient | words | peak MiB | of which before the step | seconds | of the processor |\n" + "|---" * 7 + "|"
    )
    for name in options.models:
        for size in options.sizes:
            whole = name in ("tobert", "longformer")
            size = min(size, options.largest_whole) if whole else size
            command = [sys.executable, __file__, "--worker", name, str(size), "--bert", options.bert]
            command += ["--gradient", options.gradient, "--features", options.features]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                said = done.stderr.strip().splitlines()
                print(
                    f"| {name} | | {size:,} | failed ({done.returncode}): {said[-1][:80] if said else 'killed'} | | | |",
                    flush=True,
                )
                break
            found = json.loads(done.stdout)
            memory = f"{found['peak']:.0f} | {found['before']:.0f}"
            print(
                f"| {name} | {found['gradient']} | {size:,} | {memory} | {found['wall']:.1f} | {found['process']:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
