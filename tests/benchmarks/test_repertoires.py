"""Repertoires: what is in the bags, which sequences DeepRC's rule keeps, and a whole grid in seconds."""

import json
import sys

import numpy as np
import pytest
import torch
from benchmarks.repertoires_data import AMINO, LENGTH, SHORTEST, Repertoires, carries, cdr3_generator, codes, implant, receptors

import setstream as ss
from benchmarks import repertoires
from setstream.errors import ConfigurationError

MOTIF = "LK.DQ"


def random_receptors(count=2000, seed=0):
    """Sequences of random residues, none of which carries the motif."""
    rng = np.random.default_rng(seed)
    letters = [letter for letter in AMINO if letter != "K"]
    return codes(["".join(rng.choice(letters, rng.integers(SHORTEST, LENGTH + 1))) for _ in range(count)])


def bags(rate=0.01, seed=0, size=300, motif=MOTIF):
    return Repertoires(torch.from_numpy(random_receptors()), count=8, size=size, rate=rate, motif=motif, seed=seed)


def test_olga_draws_receptors_and_the_same_ones_again():
    drawn = [cdr3_generator(seed=3)() for _ in range(2)]
    assert drawn[0] == drawn[1]
    draw = cdr3_generator()
    sequences = [draw() for _ in range(50)]
    assert all(set(sequence) <= set(AMINO) for sequence in sequences)
    assert sum(sequence[0] == "C" and sequence[-1] == "F" for sequence in sequences) == 50


def test_the_receptors_of_bags_are_codes_without_the_ends():
    kept = receptors(40)
    assert (kept.shape, kept.dtype) == ((40, LENGTH), np.uint8)
    draw = cdr3_generator()
    first = next(one for one in (draw()[3:-3] for _ in range(100)) if SHORTEST <= len(one) <= LENGTH)
    assert "".join(AMINO[code - 1] for code in kept[0] if code) == first
    lengths = (kept > 0).sum(1)
    assert SHORTEST <= lengths.min() <= lengths.max() <= LENGTH


def test_an_implanted_motif_keeps_length_and_wildcard():
    rows = torch.from_numpy(random_receptors())
    changed = implant(rows, MOTIF, torch.Generator().manual_seed(0))
    assert not carries(rows, MOTIF).any()
    assert carries(changed, MOTIF).all()
    assert torch.equal(changed > 0, rows > 0)
    assert int((changed != rows).sum(1).max()) <= 4  # four letters and a point
    begins = (changed == 1 + AMINO.index("K")).float().argmax(1) - 1
    room = (rows > 0).sum(1) - len(MOTIF)
    assert bool((begins <= room).all())
    assert {int(begin) for begin in begins} == set(range(LENGTH - len(MOTIF) + 1))
    untouched = torch.arange(LENGTH) == (begins + 2).unsqueeze(1)
    assert torch.equal(changed[untouched], rows[untouched])


@pytest.mark.parametrize("rate", [0.0001, 0.01, 0.1])
def test_positive_bags_carry_the_motif_as_often_as_the_rate_says(rate):
    for number, bag in enumerate(bags(rate)):
        assert (bag.shape, bag.dtype) == ((300, LENGTH), torch.uint8)
        assert int(carries(bag, MOTIF).sum()) == (max(1, round(300 * rate)) if number % 2 else 0)


def test_bags_come_again_and_rates_differ_in_the_motif_alone():
    assert all(torch.equal(a, b) for a, b in zip(bags(), bags(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(bags(), bags(seed=1), strict=True))
    for few, many in zip(bags(0.01), bags(0.1), strict=True):
        assert int((few != many).any(1).sum()) <= 30
    with pytest.raises(ConfigurationError, match="above 0 and at most 1; got 0"):
        bags(0)
    with pytest.raises(ConfigurationError, match="1 to 6 of the letters .* got 'XK'"):
        bags(motif="XK")


def test_features_do_not_depend_on_other_sequences_and_are_mostly_zero():
    rows = torch.from_numpy(random_receptors())
    phi = repertoires.build(rows, 0).encoder.phi
    features = phi(rows)
    torch.testing.assert_close(phi(rows[7:9]), features[7:9])
    silent = (features == 0).float().mean(0)
    torch.testing.assert_close(silent, torch.full_like(silent, repertoires.SILENT), atol=0.001, rtol=0)


def test_the_top_rule_keeps_the_largest_attention():
    rows = torch.from_numpy(random_receptors())
    encoder = repertoires.build(rows, 0).encoder
    sets = rows[:600].view(2, 300, LENGTH)
    weights = encoder.attention(sets, encoder.update(None, sets)).sum((1, 2))  # (2, 300)
    kept = repertoires.largest_attention(encoder, sets, 30)
    for bag, weight, chosen in zip(sets, weights, kept, strict=True):
        wanted = bag[weight > weight.sort(descending=True).values[30]]
        assert sorted(map(tuple, chosen.tolist())) == sorted(map(tuple, wanted.tolist()))
    torch.testing.assert_close(repertoires.top(encoder, sets, 300), encoder(sets))


@pytest.mark.parametrize("way", repertoires.WAYS)
def test_all_ways_are_the_full_gradient_when_they_keep_all_sequences(way):
    rows = torch.from_numpy(random_receptors())
    encoder = repertoires.build(rows, 0).encoder
    sets = rows[:600].view(2, 300, LENGTH)

    def gradient(encode):
        encoder.zero_grad()
        encode(encoder, sets, 300).square().sum().backward()
        return encoder.phi.convolution.weight.grad.clone()

    whole = gradient(lambda encoder, sets, _: ss.encode(encoder, sets, gradient="full"))
    torch.testing.assert_close(gradient(repertoires.WAYS[way]), whole, rtol=1e-3, atol=1e-5 * float(whole.abs().max()))


def test_a_grid_is_run_once_and_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(repertoires, "receptors", random_receptors)
    monkeypatch.setattr(repertoires, "BATCH", 2)
    threads = torch.get_num_threads()
    results = tmp_path / "grid.jsonl"
    sizes = ["--size", "200", "--elements", "20", "--steps", "3", "--test-bags", "4", "--seeds", "0", "1"]
    arguments = ["repertoires", *sizes, "--results", str(results)]
    for extra in ([], ["--table"], ["--picture", str(tmp_path / "grid.png")]):
        monkeypatch.setattr(sys, "argv", arguments + extra)
        repertoires.main()
    torch.set_num_threads(threads)
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    trained = [line for line in lines if "auroc" in line]
    assert len(lines) == 1 + len(trained)  # and one of times
    kinds = {(line["way"], line["rate"], line["seed"]) for line in trained}
    assert len(trained) == len(kinds) == len(repertoires.WAYS) * 3 * 2
    for line in trained:  # each way was tested after as many steps as take the time of `importance`
        steps = round(3 * lines[0]["times"]["importance"] / lines[0]["times"][line["way"]])
        assert line["taken"] == max(3, steps)
        assert line["auroc"] == {"memory": line["curve"]["3"], "time": line["curve"][str(steps)]}
    shown = capsys.readouterr().out
    assert "| importance | " in shown
    assert "| 1 in 10,000 | mean of 1 in 1,000 and rarer |" in shown
    assert (tmp_path / "grid.png").stat().st_size > 10_000


def test_differences_are_paired_by_seed_and_have_an_interval():
    found = {
        ("importance", 0.001): {0: {"memory": 0.9}, 1: {"memory": 0.8}},
        ("importance", 0.0001): {0: {"memory": 0.7}, 1: {"memory": 0.8}},
        ("top", 0.001): {0: {"memory": 0.4}, 1: {"memory": 0.7}},
        ("top", 0.0001): {1: {"memory": 0.5}},
    }
    assert repertoires.gains(found, "top", "memory", [0.001]) == pytest.approx([0.5, 0.1])
    assert repertoires.gains(found, "top", "memory", [0.001, 0.0001]) == pytest.approx([0.2])
    assert repertoires.difference([0.1, 0.2, 0.3]) == pytest.approx((0.2, 4.303 * 0.1 / 3**0.5), abs=1e-3)
