"""A user's own accumulators: they pass the laws, stream, are saved, and go over two ranks. No other file knows them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import setstream as ss
from setstream.errors import ConfigurationError, RemovalError, StateFormatError
from setstream.states import accumulators
from setstream.states.accumulators import Accumulator, Sums
from tests.states.own_accumulators import POOLS, TopK, make

WORKER = Path(__file__).parent / "own_accumulator_worker.py"


@pytest.fixture
def x():
    return torch.randint(20, (3, 40, 3)).float() + torch.rand(3, 40, 3) / 4


@pytest.mark.parametrize("name", POOLS)
def test_the_laws_hold(name, x):
    encoder = make(name)
    ss.testing.check_mini_batch_consistency(encoder, x)
    ss.testing.check_permutation_invariance(encoder, x)
    ss.testing.check_merge(encoder, x)


def test_the_gradient_of_one_element_alone(x):
    model = ss.SetModel(make("top-k"), torch.nn.Linear(8, 2))
    ss.testing.check_exact_gradient(model, x)
    ss.testing.check_unbiased_gradient(model, x, draws=300)


def test_contributions_of_chunks_sum_to_the_whole(x):
    encoder = make("top-k").eval()
    chunks = [encoder.update(None, part).accumulators["largest"] for part in x.split(7, dim=1)]
    whole, owners = chunks[0], chunks[0].new_owners(0)
    for index, chunk in enumerate(chunks[1:], start=1):
        owners = whole.merge_owners(chunk, owners, chunk.new_owners(index))
        whole = whole.merge(chunk)
    total = sum(chunk.contribution(whole, owners == index)["value"] for index, chunk in enumerate(chunks))
    assert torch.equal(total, whole["value"])


@pytest.mark.parametrize("name", POOLS)
def test_streams_and_files(name, x, tmp_path):
    encoder = make(name).eval()
    stream = ss.SetModel(encoder, torch.nn.Identity()).stream()
    for chunk in x.split(9, dim=1):
        stream.update(chunk)
    expected = encoder(x)
    torch.testing.assert_close(stream.predict(), expected)
    stream.state.save(tmp_path / "state.safetensors")
    again = ss.State.load(tmp_path / "state.safetensors")
    torch.testing.assert_close(encoder.finalize(again), expected)
    torch.testing.assert_close(encoder.finalize(ss.State.cat(list(again))), expected)
    torch.testing.assert_close(encoder.finalize(again + encoder.empty(3)), expected)
    if name == "count-min":
        torch.testing.assert_close(encoder.finalize(again + again - again), expected)
    else:
        with pytest.raises(RemovalError, match="elements cannot be removed from a tests.top-k"):
            again + again - again
        with pytest.raises(ConfigurationError, match="a tests.top-k cannot decay"):
            again * 0.5


def test_two_ranks():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    root = WORKER.parent.parent.parent
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, "tests.states.own_accumulator_worker"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=root,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "own accumulators: all equal" in done.stdout


def test_a_kind_is_unknown_until_its_module_is_imported(x, monkeypatch):
    data = make("top-k").eval().update(None, x).to_bytes()
    monkeypatch.delitem(Accumulator._kinds, TopK.kind)
    with pytest.raises(StateFormatError, match="unknown kind 'tests.top-k': import the module that defines it"):
        ss.State.from_bytes(data)


def test_kinds_are_unique():
    with pytest.raises(ConfigurationError, match="there is an accumulator of kind 'sums': setstream"):

        class Other(Accumulator):
            kind = "sums"

    with pytest.raises(ConfigurationError, match="needs its own kind"):

        class Nameless(Sums):
            pass


def test_edited_numbers_are_refused(x):
    state = make("top-k").eval().update(None, x)
    state.accumulators["largest"]["value"].neg_()
    with pytest.raises(StateFormatError, match="largest: not the largest of any elements"):
        ss.State.from_bytes(state.detach().to_bytes())


def test_old_names_warn(x):
    state = make("top-k").eval().update(None, x)
    with pytest.warns(DeprecationWarning, match=r"State.parts is now State.accumulators"):
        assert state.parts is state.accumulators
    with pytest.warns(DeprecationWarning, match="Part is now Accumulator"):
        assert accumulators.Part is Accumulator
