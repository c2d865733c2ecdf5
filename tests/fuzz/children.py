"""Read damaged input in child processes, so that a crash is seen and counted, and memory is that of the reader."""

import collections
import multiprocessing
import random
import resource
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from setstream.errors import SetstreamError
from tests.fuzz.targets import TARGETS

SHARE = 1000  # inputs of one child
LONGEST = 60.0  # seconds for one input, after which its child is killed


@dataclass
class Outcome:
    """What became of many damaged inputs."""

    inputs: int = 0
    became: collections.Counter = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)  # crashes, and errors that are not ours
    slowest: float = 0.0
    memory: int = 0


def peak_memory():
    """Of this process, in bytes; a fork begins with the memory of its parent."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _read(name, seeds, pipe):
    target, before = TARGETS[name], peak_memory()
    folder = Path(tempfile.mkdtemp(prefix="setstream-fuzz-"))
    try:
        originals = target.originals(folder)
        keys = sorted(originals)
        for seed in seeds:
            draw = random.Random(seed)
            key = draw.choice(keys)
            data = target.damage(originals[key], draw)
            pipe.send((seed, key))
            began, became = time.perf_counter(), "read"
            try:
                target.read(key, data, folder)
            except SetstreamError as error:
                became = type(error).__name__
            except BaseException as error:
                became = f"not ours: {error!r}"[:300]
            pipe.send((became, time.perf_counter() - began, peak_memory() - before))
        pipe.send(None)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def attack(name: str, count: int, seconds: float = 600.0, first: int = 0) -> Outcome:
    """Read `count` damaged inputs of a target, or as many as there is time for."""
    outcome, ends = Outcome(), time.monotonic() + seconds
    context = multiprocessing.get_context("fork")
    seed, last = first, first + count
    while seed < last and time.monotonic() < ends:
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=_read, args=(name, range(seed, min(last, seed + SHARE)), there))
        child.start()
        there.close()
        at, key = seed, "its originals"
        try:
            while here.poll(LONGEST):
                said = here.recv()
                if said is None:
                    seed = min(last, seed + SHARE)
                    break
                if len(said) == 2:
                    at, key = said
                    continue
                became, took, memory = said
                outcome.inputs += 1
                outcome.became[became.partition(":")[0]] += 1
                outcome.slowest, outcome.memory = max(outcome.slowest, took), max(outcome.memory, memory)
                if became.startswith("not ours"):
                    outcome.wrong.append(f"{name} {key}, seed {at}: {became}")
            else:
                child.kill()
                outcome.wrong.append(f"{name} {key}, seed {at}: took more than {LONGEST:.0f} s")
                seed = at + 1
        except EOFError:  # it died
            child.join()
            outcome.wrong.append(f"{name} {key}, seed {at}: died of signal {-(child.exitcode or 0)}")
            outcome.inputs += 1
            seed = at + 1
        child.join()
    return outcome
