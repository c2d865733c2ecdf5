"""The playground's window over events: live, of the past, and by late events, it answers what the events in it give."""

import random
from pathlib import Path

import pytest
import torch

from setstream.serve.playground.session import Session
from setstream.serve.playground.windows import LONGEST, MACHINES, SECONDS, SHARPNESS, Events, sharp_attention, simulate

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def truth(events, since, until):
    """What the three pools say about the events of these seconds, in float64: (3, 1 + MACHINES)."""
    inside = [(load, machine) for time, load, machine in events if since <= time < until]
    load = torch.tensor([float(torch.tensor(own)) for own, _ in inside], dtype=torch.float64)  # rounded to float32
    machine = torch.eye(MACHINES, dtype=torch.float64)[[own for _, own in inside]]
    element = torch.cat([load[:, None], machine], 1)
    highest = torch.cat([load[:, None], machine * load[:, None]], 1).amax(0)
    return torch.stack([(SHARPNESS * load).softmax(0) @ element, highest, element.mean(0)])


def answers(looked):
    return torch.tensor([own["answer"] for own in looked["models"].values()], dtype=torch.float64)


@pytest.fixture
def tab():
    return Events()


def test_sharp_attention_is_the_mean_of_features_by_the_exponential_of_the_first():
    features = torch.rand(1, 50, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = (30 * features[0, :, 0]).softmax(0) @ features[0]
    torch.testing.assert_close(sharp_attention(5, 30.0).double()(features)[0, 0], expected)


@pytest.mark.parametrize("seed", range(3))
def test_every_window_is_what_its_events_give_also_of_the_past_and_with_late_events(tab, seed):
    choose = random.Random(seed)
    events, now, lives = list(tab.simulate(seed=seed)["events"]), 0, set()
    for _ in range(40):
        if now < SECONDS and choose.random() < 0.5:
            now = tab.advance(to=min(SECONDS, now + choose.randint(1, 9)), length=choose.randint(1, LONGEST))["now"]
        if choose.random() < 0.3:
            new = [(choose.uniform(0, SECONDS - 0.01), choose.random(), choose.randrange(MACHINES)) for _ in range(3)]
            assert tab.report(events=new)["late"] == sum(time < now for time, *_ in new)
            events += new
        if now:
            length, until = choose.randint(1, LONGEST), choose.choice([now, choose.randint(1, now)])
            looked = tab.look(length=length, until=until)
            assert looked["count"] == sum(looked["since"] <= time < until for time, *_ in events)
            assert looked["live"] == (until == now)
            lives.add(looked["live"])
            if looked["count"]:
                torch.testing.assert_close(answers(looked), truth(events, until - length, until), **CLOSE)
                assert all(own["apart"] < 1e-6 for own in looked["models"].values())
    assert lives == {True, False}


def test_the_curve_as_it_was_live_is_the_curve_of_a_sweep_and_of_looking(tab):
    live = [said for to in (7, 8, 40) for said in tab.advance(to=to, length=9)["curve"]]
    swept = tab.sweep(length=9)
    assert swept["apart"] < 1e-6
    assert len(live) == len(swept["curve"]) == 40
    torch.testing.assert_close(torch.tensor(live), torch.tensor(swept["curve"]), **CLOSE)
    for until in (1, 8, 25, 40):
        looked = answers(tab.look(length=9, until=until))
        torch.testing.assert_close(looked, torch.tensor(swept["curve"][until - 1]).double(), **CLOSE)


def test_a_window_without_events_has_no_answer(tab):
    tab.times, tab.elements = tab.times[:0], tab.elements[:0]
    assert tab.advance(to=3, length=2)["curve"] == [None] * 3
    assert tab.look(length=2, until=3) == {"since": 1, "until": 3, "live": True, "count": 0, "models": {}, "weights": []}
    assert tab.look(length=1, until=2)["count"] == 0
    assert tab.sweep(length=2) == {"curve": [None] * 3, "apart": 0.0}
    tab.report(events=[(0.5, 0.25, 3)])
    assert [said and said[1][0] for said in tab.sweep(length=2)["curve"]] == [0.25, 0.25, None]


def test_the_weights_are_those_of_attention_and_belong_to_the_events_of_the_window(tab):
    events = tab.simulate(seed=1)["events"]
    tab.advance(to=30, length=5)
    for until in (30, 20):
        weights = dict(tab.look(length=10, until=until)["weights"])
        assert set(weights) == {place for place, (time, *_) in enumerate(events) if until - 10 <= time < until}
        loads = torch.tensor([events[place][1] for place in weights], dtype=torch.float64)
        torch.testing.assert_close(torch.tensor(list(weights.values())).double(), (SHARPNESS * loads).softmax(0), **CLOSE)


def test_only_a_mean_can_always_subtract_what_is_too_old(tab):
    tab.advance(to=40, length=5)
    tab.report(events=[(1.0, 1.0, 0)])  # a peak, with almost all of the weight
    first, later = (tab.look(length=5, until=until)["models"] for until in (5, 40))
    assert all(own["subtracted"] == {"apart": None} for own in first.values())
    assert later["attention"]["subtracted"] == {"refused": "PrecisionError"}
    assert later["maximum"]["subtracted"] == {"refused": "RemovalError"}
    assert later["mean"]["subtracted"]["apart"] < 1e-6


def test_a_simulated_stream_is_in_order_and_begins_anew():
    for seed in range(20):
        events = simulate(seed)
        times, loads, machines = (torch.tensor(own) for own in zip(*events, strict=True))
        assert (times.diff() >= 0).all()
        assert times[0] >= 0
        assert times[-1] < SECONDS
        assert 0 <= loads.min() < 0.25 < 0.5 < loads.max() <= 1
        assert machines.unique().tolist() == list(range(MACHINES))
    tab = Events()
    tab.advance(to=50, length=5)
    tab.simulate(seed=3)
    tab.advance(to=20, length=5)
    torch.testing.assert_close(answers(tab.look(length=5, until=9)), truth(simulate(3), 4, 9), **CLOSE)


def test_nothing_is_left_of_a_visitor_who_left():
    session = Session()
    (answer,) = session.answers('{"ask": 0, "do": "advance", "to": 3, "length": 1}')
    assert answer["now"] == 3
    file = Path(session._tab(Events).store.rows.place)
    assert file.exists()
    del session
    assert not file.parent.exists()
