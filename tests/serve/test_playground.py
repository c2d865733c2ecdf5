"""The playground's WebSocket: what a visitor may say, and what comes back."""

import json

import pytest
import torch
from starlette.testclient import WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect

from setstream.serve.playground import session, tabs
from setstream.serve.playground.tabs import MOST_POINTS, SIDE
from setstream.tasks.clustering import sample
from tests.serve.conftest import serving

MODELS = set(tabs.CLUSTERING)
TOKEN = "a-token-of-thirty-two-characters"
PLACE = "ws://localhost/playground/live"


class Visitor:
    """Says things, and hears the answers."""

    def __init__(self):
        self.session = session.Session()
        self.asked = 0

    def hear(self, do, **fields):
        self.asked += 1
        answers = list(self.session.answers(json.dumps({"ask": self.asked, "do": do} | fields)))
        assert all(own["ask"] == self.asked for own in answers)
        assert [own["last"] for own in answers] == [False] * (len(answers) - 1) + [True]
        return answers

    def ask(self, do, **fields):
        (answer,) = self.hear(do, **fields)
        return answer


@pytest.fixture
def visitor():
    return Visitor()


def test_a_drawn_set_is_a_sample_with_the_nll_of_its_truth(visitor):
    drawn = sample(1, 50, generator=torch.Generator().manual_seed(7))
    answer = visitor.ask("draw", seed=7, points=50)
    torch.testing.assert_close(torch.tensor(answer["points"]), drawn.points[0])
    assert answer["labels"] == drawn.labels[0].tolist()
    assert answer["oracle"] == pytest.approx(float(drawn.oracle()))


def test_every_order_streams_every_point_once_and_consistent_models_end_at_one_answer(visitor):
    visitor.ask("draw", seed=1, points=60)
    ends = {}
    for kind in ("single point", "class", "chunk", "one each"):
        visitor.ask("rewind")
        chunks = visitor.ask("order", kind=kind, seed=5)["chunks"]
        assert sorted(position for chunk in chunks for position in chunk) == list(range(60))
        for chunk in chunks:
            answer = visitor.ask("append", chunks=[chunk])
        assert answer["count"] == 60
        assert set(answer["models"]) == MODELS
        ends[kind] = {name: own["nll"] for name, own in answer["models"].items()}
    for name in MODELS:
        nlls = [own[name] for own in ends.values()]
        apart = max(nlls) - min(nlls)
        assert apart < 1e-4 if name != "set-transformer" else apart > 0.1, (name, nlls)
    *compared, last = visitor.hear("compare", seed=5)
    assert "model" not in last
    for own in compared:
        assert own["disagreement"] < 1e-4 if own["model"] != "set-transformer" else own["disagreement"] > 0.1
        for kind, end in own["streams"].items():
            assert end["nll"] == pytest.approx(ends[kind][own["model"]], rel=1e-3, abs=1e-4)
    assert {own["model"] for own in compared} == MODELS


def test_painted_points_join_the_set_and_the_oracle_knows_their_colours(visitor):
    points = [[0.0, 0.0], [1.0, 1.0], [4.0, 4.0], [4.5, 4.0]]
    assert visitor.ask("put", points=points, labels=[0, 0, 1, 1])["oracle"] > 0
    answer = visitor.ask("append", chunks=[[0, 1], [2, 3]])
    assert answer["count"] == 4
    known = tabs.by_colour(torch.tensor(points), torch.tensor([0, 0, 1, 1]))
    assert known.means[0].tolist() == [[0.5, 0.5], [4.25, 4.0]]
    assert float(known.scales.min()) == pytest.approx(tabs.SMALLEST_SCALE)  # two points of one height
    assert visitor.ask("clear")["oracle"] is None
    assert "empty" in visitor.ask("append", chunks=[[0]])["problem"]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"do": "draw", "points": MOST_POINTS + 1}, "less than or equal to 2048"),
        ({"do": "draw", "colour": 1}, "colour"),
        ({"do": "fly"}, "unknown verb 'fly': expected one of draw"),
        ({"do": "order", "kind": "x"}, "choose one of single point"),
        ({"do": "append", "chunks": [[99]]}, "positions end at 19"),
        ({"do": "append", "chunks": [[]]}, "at least 1"),
        ({"do": "append", "chunks": [[-1]]}, "greater than or equal to 0"),
        ({"do": "put", "points": [[0, 1]], "labels": []}, "every point has a label"),
        ({"do": "put", "points": [[0, 1e9]], "labels": [0]}, "less than or equal to 100"),
        ({"do": "put", "points": [[0, 0]] * MOST_POINTS, "labels": [0] * MOST_POINTS}, "at most 2048 points"),
        ({"do": "picture", "colours": [[0, 0, 0]]}, "at least 1024"),
        ({"do": "paint", "pixels": [[1024, 0, 0, 0]]}, "less than 1024"),
        ({"do": "paint", "pixels": [[0, 0, 0, 256]]}, "less than or equal to 255"),
        ({"do": "simulate", "seed": -1}, "greater than or equal to 0"),
        ({"do": "report", "events": []}, "at least 1"),
        ({"do": "report", "events": [[120, 0.5, 0]]}, "less than 120"),
        ({"do": "report", "events": [[1, 1.5, 0]]}, "less than or equal to 1"),
        ({"do": "report", "events": [[1, 0.5, 4]]}, "less than 4"),
        ({"do": "report", "events": [[1, 0.5, 0]] * 2048}, "at most 2048 events"),
        ({"do": "advance", "to": 121, "length": 5}, "less than or equal to 120"),
        ({"do": "advance", "to": 0, "length": 5}, "up to second 0: a stream goes on from there; got 0"),
        ({"do": "advance", "to": 5, "length": 61}, "less than or equal to 60"),
        ({"do": "look", "length": 5, "until": 1}, "up to second 0: a window ends in second 1 to there; got 1"),
        ({"do": "sweep", "length": 0}, "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_is_refused_with_what_was_expected_and_changes_nothing(visitor, message, expected):
    visitor.ask("draw", seed=0, points=20)
    before = visitor.ask("append", chunks=[[0, 1, 2]])
    assert expected in visitor.ask(**message)["problem"]
    assert visitor.ask("append", chunks=[])["models"] == before["models"]


NO_MESSAGES = ["", "[]", "{}", '{"ask": -1, "do": "draw"}', '{"ask": 1}', '{"ask": NaN, "do": "draw"}', "\ud800"]
NO_MESSAGES += ['{"ask": 1, "do": "_begin"}', '{"ask": 1, "do": "draw", "self": 1}', '{"ask": 1, "do": "clear", "points": []}']


@pytest.mark.parametrize("text", NO_MESSAGES)
def test_what_is_no_message_is_answered(visitor, text):
    (answer,) = visitor.session.answers(text)
    assert answer["problem"]
    assert answer["last"]


def test_pixels_that_are_rubbed_out_or_painted_over_leave_no_trace(visitor):
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(SIDE * SIDE, generator=generator)[:60].tolist()
    colours = torch.randint(0, 256, (60, 3), generator=generator).tolist()
    pixels = [[place, *colour] for place, colour in zip(places, colours, strict=True)]
    direct = visitor.ask("paint", pixels=pixels[:30])
    visitor.ask("picture")
    visitor.ask("paint", pixels=[[place, 255, 0, 0] for place, *_ in pixels[:40]])  # first in another colour
    visitor.ask("paint", pixels=pixels[:40])
    visitor.ask("paint", pixels=pixels[40:])
    roundabout = visitor.ask("paint", erase=[place for place, *_ in pixels[30:]])
    assert direct["count"] == roundabout["count"] == 30
    for name in tabs.COMPLETION:
        a, b = (torch.tensor(own["models"][name]["mean"]) for own in (direct, roundabout))
        assert int((a - b).abs().max()) <= 2, name  # of 255: subtraction in float32
    assert visitor.ask("paint", erase=places) == {"ask": visitor.asked, "last": True, "count": 0, "models": {}}


def test_more_pixels_of_a_known_picture_are_a_better_completion(visitor):
    rows = torch.linspace(0, 255, SIDE).round().int().repeat_interleave(SIDE)
    colours = torch.stack([rows, 255 - rows, torch.full_like(rows, 128)], 1).tolist()
    visitor.ask("picture", colours=colours)
    order = torch.randperm(SIDE * SIDE, generator=torch.Generator().manual_seed(1)).tolist()
    few = visitor.ask("paint", pixels=[[place, *colours[place]] for place in order[:5]])
    many = visitor.ask("paint", pixels=[[place, *colours[place]] for place in order[5:400]])
    for name in tabs.COMPLETION:
        assert many["models"][name]["nll"] < few["models"][name]["nll"]


def test_over_a_websocket_with_a_token_and_not_without(tmp_path):
    with serving(tmp_path / "states.db", tokens=(TOKEN,)) as client:
        with pytest.raises(WebSocketDenialResponse) as refused, client.websocket_connect(PLACE):
            pass
        assert refused.value.status_code == 401
        protocols = ["setstream", f"bearer.{TOKEN}"]
        with client.websocket_connect(PLACE, subprotocols=protocols) as socket:
            assert socket.accepted_subprotocol == "setstream"
            socket.send_json({"ask": 3, "do": "draw", "points": 8})
            assert len(socket.receive_json()["points"]) == 8
            socket.send_json({"ask": 4, "do": "fly"})
            assert "unknown verb" in socket.receive_json()["problem"]
            socket.send_json({"ask": 5, "do": "append", "chunks": [[0]]})  # still there
            assert socket.receive_json()["count"] == 1


def test_visitors_beyond_the_limit_are_told_so(client, monkeypatch):
    monkeypatch.setattr(session, "MOST_VISITORS", 1)
    with client.websocket_connect(PLACE) as first:
        with client.websocket_connect(PLACE) as second, pytest.raises(WebSocketDisconnect) as left:
            second.receive_json()
        assert left.value.code == session.TRY_AGAIN_LATER
        first.send_json({"ask": 0, "do": "clear"})
        assert first.receive_json()["last"]
    with client.websocket_connect(PLACE) as third:
        third.send_json({"ask": 0, "do": "clear"})
        assert third.receive_json()["last"]
        third.send_bytes(b"what?")
        with pytest.raises(WebSocketDisconnect) as left:
            third.receive_json()
        assert left.value.code == session.NOT_TEXT
