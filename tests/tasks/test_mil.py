"""Multiple instance learning: bags, folds, metrics, models, the two streams."""

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score
from torch import nn

import setstream as ss
from setstream import testing
from setstream.errors import ConfigurationError, DataError
from setstream.tasks.mil import Bags, Mil, classic, folds, read_bags
from setstream.tasks.mil.metrics import auroc, best_threshold, bootstrap, f1, summary
from setstream.tasks.mil.models import MODELS
from setstream.training import Encode, TrainConfig, Trainer

WHOLE = ("ab-mil", "ds-mil")


def needles(count=40, seed=0):
    """Bags of 5 to 30 instances; positive ones hold an instance far away."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    bags = [torch.randn(int(torch.randint(5, 30, (), generator=generator)), 6, generator=generator) for _ in range(count)]
    for bag, label in zip(bags, labels, strict=True):
        bag[0] += 5.0 * label
    return Bags(bags, labels)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("two_stream", [False, True])
def test_every_model_learns_needles(name, two_stream, tmp_path):
    if name == "ds-mil" and two_stream:
        pytest.skip("DS-MIL has two streams of its own")
    task = Mil(bags=needles(), count=4)
    options = {"widths": [32]} | ({} if name == "ds-mil" else {"two_stream": two_stream})
    options |= {"num_slots": 8} if name.startswith(("umbc", "sse")) else {}
    config = TrainConfig(
        "mil", name, model_options=options, steps=150, batch=4, lr=3e-3, gradient="full", schedule="cosine", tensorboard=False
    )
    result = Trainer(task, config, tmp_path, shown=False).run()
    assert result.metrics["auroc"] > 0.8, result.metrics


@pytest.mark.parametrize("name", [name for name in MODELS if name not in WHOLE])
def test_models_that_stream_are_consistent_in_both_streams(name):
    torch.manual_seed(0)
    model = MODELS[name](in_dim=6, widths=[16], two_stream=True).eval()
    testing.check_mini_batch_consistency(model.encoder, torch.randn(2, 50, 6))
    logits = model(torch.randn(3, 20, 6))
    assert logits.shape == (3, 2)


@pytest.mark.parametrize("grad_chunks", [1, 2, 3])
def test_the_gradient_of_both_streams_is_unbiased(grad_chunks):
    """2,000 draws, largest z over all parameters below the bound for their number."""
    torch.manual_seed(0)
    pool = ss.Parallel(instance=ss.Projected(nn.Linear(8, 1), ss.DeepSets("max")), bag=ss.UMBC(8, num_slots=2))
    encoder = ss.SetEncoder(nn.Sequential(nn.Linear(3, 8), nn.Tanh()), pool)
    sets = [torch.randn(n, 3) for n in (11, 7)]
    testing.check_unbiased_gradient(encoder, sets, gradient="unbiased", chunk_size=3, grad_chunks=grad_chunks)
    with pytest.raises(ConfigurationError, match="with replacement is biased"):
        ss.encode(encoder, sets, chunk_size=3, grad_chunks=2, replacement=True)


def test_a_stage_with_gradients_through_chunks_trains():
    task = Mil(bags=needles(), count=4)
    model = task.build("umbc+set-transformer", widths=[16], num_slots=4, two_stream=True).train()
    batch = task.batch(0, 3, torch.Generator())
    for gradient in ("unbiased", "importance", "exact"):
        task.loss(model, batch, Encode(gradient, chunk_size=4)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_folds_hold_out_everything_once_with_labels_in_equal_shares():
    labels = torch.tensor([1] * 47 + [0] * 45)
    parts = folds(labels, 10, seed=3)
    assert sorted(position for part in parts for position in part) == list(range(92))
    shares = [int(labels[part].sum()) for part in parts]
    assert max(shares) - min(shares) <= 1
    assert parts != folds(labels, 10, seed=4)
    assert parts == folds(labels, 10, seed=3)


def test_an_epoch_brings_every_bag_once():
    task = Mil(bags=needles(20), count=4)
    seen = [task.batch(step, 5, torch.Generator())["label"] for step in range(3)]
    assert float(torch.cat(seen).sum()) == float(task.train.labels.sum())


def test_metrics_are_those_of_scikit_learn():
    generator = np.random.default_rng(0)
    for _ in range(20):
        label = generator.integers(0, 2, 30)
        probability = np.round(generator.random(30), 1)  # with ties
        if 0 < label.sum() < 30:
            assert auroc(torch.tensor(probability), torch.tensor(label)) == pytest.approx(roc_auc_score(label, probability))
        predicted = probability > 0.5
        assert f1(torch.tensor(predicted), torch.tensor(label)) == pytest.approx(f1_score(label, predicted))
    assert np.isnan(auroc(torch.rand(3), torch.zeros(3)))
    found = summary(torch.tensor([0.9, 0.2]), torch.tensor([1, 0]))
    assert (found["accuracy"], found["auroc"], found["selection"]) == (1.0, 1.0, 1.0)


def test_thresholds_and_intervals():
    probability, label = torch.tensor([0.1, 0.2, 0.3, 0.35]), torch.tensor([0, 0, 1, 1])
    assert 0.2 < best_threshold(probability, label) < 0.3
    low, high = bootstrap(torch.cat([torch.ones(80), torch.zeros(20)]))
    assert 0.70 < low < 0.8 < high < 0.9


def test_bags_from_csv(tmp_path):
    (tmp_path / "bags.csv").write_text("1,7,0.5,1\n1,7,2,3\n0,9,4,5\n")
    bags = read_bags(tmp_path / "bags.csv")
    assert [bag.tolist() for bag in bags.bags] == [[[0.5, 1.0], [2.0, 3.0]], [[4.0, 5.0]]]
    assert bags.labels.tolist() == [1, 0]
    (tmp_path / "bad.csv").write_text("1,2\n")
    with pytest.raises(DataError, match="expected label, bag and features"):
        read_bags(tmp_path / "bad.csv")
    with pytest.raises(DataError, match="no such file"):
        read_bags(tmp_path / "none.csv")
    with pytest.raises(ConfigurationError, match="unknown benchmark"):
        classic("fox")


def test_features_are_standardised_by_the_training_bags_alone():
    task = Mil(bags=needles(), count=4)
    rows = torch.cat(task.train.bags)
    torch.testing.assert_close(rows.mean(0), torch.zeros(6), atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.std(0), torch.ones(6), atol=1e-4, rtol=0)


def test_the_classic_benchmarks_are_what_they_are_known_to_be():
    sizes = {"musk1": (92, 47, 476, 166), "musk2": (102, 39, 6598, 166), "elephant": (200, 100, 1391, 230)}
    for name, (count, positive, instances, width) in sizes.items():
        bags = classic(name)
        assert (len(bags), int(bags.labels.sum())) == (count, positive)
        assert (sum(map(len, bags.bags)), bags.bags[0].shape[1]) == (instances, width)
