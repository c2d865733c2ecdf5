"""Multiple instance learning: bags, folds, metrics, models, the two streams."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.metrics import f1_score, roc_auc_score
from torch import nn

import setstream as ss
from setstream import testing
from setstream.cli.crossval import summarise
from setstream.errors import ConfigurationError, ConsistencyError, DataError
from setstream.tasks.clustering import models as clustering
from setstream.tasks.completion import models as completion
from setstream.tasks.mil import Bags, Mil, classic, folds, read_bags
from setstream.tasks.mil.metrics import auroc, best_threshold, f1, intervals, summary
from setstream.tasks.mil.models import MODELS
from setstream.training import Encode, TrainConfig, Trainer
from setstream.training.task import read_run
from tests.gradients.builders import check_unbiased


def needles(count=40, seed=0):
    """Bags of 5 to 30 instances; positive ones hold an instance far away."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    bags = [torch.randn(int(torch.randint(5, 30, (), generator=generator)), 6, generator=generator) for _ in range(count)]
    for bag, label in zip(bags, labels, strict=True):
        bag[0] += 5.0 * label
    return Bags(bags, labels)


def test_slots_of_a_second_pass_are_consistent_and_have_exact_gradients():
    model = MODELS["umbc+set-transformer"](in_dim=6, widths=[16], num_slots=8, passes=2).double()
    assert model.encoder.passes == 2
    bag = torch.randn(1, 40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    testing.check_mini_batch_consistency(model.encoder, bag)
    testing.check_exact_gradient(model.encoder, bag, chunk_size=7)


def test_numbers_of_passes_that_cannot_be():
    for build in (
        partial(MODELS["umbc+set-transformer"], in_dim=6),
        clustering.MODELS["umbc+passes"],
        completion.MODELS["umbc+anchors"],
    ):
        with pytest.raises(ConfigurationError, match="how often a set is read, at least 1; got 0"):
            build(passes=0)
    with pytest.raises(ConfigurationError, match="reads it 3 times. Leave two_stream out: .*with passes=1"):
        MODELS["umbc+set-transformer"](in_dim=6, passes=3, two_stream=True)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("two_stream", [False, True])
def test_every_model_learns_needles(name, two_stream, tmp_path):
    if name in ("ds-mil", "transmil") and two_stream:
        pytest.skip("DS-MIL has two streams of its own, and TransMIL takes long")
    task = Mil(bags=needles(), count=4)
    options = {"widths": [32]} | ({} if name == "ds-mil" else {"two_stream": two_stream})
    options |= {"num_slots": 8} if name.startswith(("umbc", "sse")) else {}
    steps = 50 if name == "transmil" else 150
    config = TrainConfig(
        "mil", name, model_options=options, steps=steps, batch=4, lr=3e-3, gradient="full", schedule="cosine", tensorboard=False
    )
    result = Trainer(task, config, tmp_path, shown=False).run()
    assert result.metrics["auroc"] > 0.8, result.metrics


def rare(count=60, size=300, seed=0):
    """Bags of standard normal instances; in positive ones, one in a hundred is shifted in the same direction."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(64, generator=generator)
    labels = torch.arange(count) % 2
    bags = torch.randn(count, size, 64, generator=generator)
    bags[1::2, : size // 100] += 6 * direction / direction.norm()
    return Bags(list(bags), labels)


def test_the_defaults_learn_rare_instances(tmp_path):
    """After epochs without progress. With layer norms and dropout 0.5 in the head, or less patience, it stays at chance."""
    task_options = {"count": 4, "validation": 0.2}
    config = Mil.config("umbc+set-transformer", task_options, model_options={"widths": [32], "num_slots": 8}, tensorboard=False)
    result = Trainer(Mil(bags=rare(), **task_options), config, tmp_path, shown=False).run()
    assert result.metrics["auroc"] > 0.95, result.metrics


@pytest.mark.parametrize("name", [name for name in MODELS if name != "transmil"])
def test_models_are_consistent_in_both_streams(name):
    torch.manual_seed(0)
    model = MODELS[name](in_dim=6, widths=[16], two_stream=name != "ds-mil").eval()
    testing.check_mini_batch_consistency(model.encoder, torch.randn(2, 50, 6))
    logits = model(torch.randn(3, 20, 6))
    assert logits.shape == (3, 2)


def test_transmil_refuses_chunks():
    model = MODELS["transmil"](in_dim=6, widths=[16]).eval()
    state = model.encoder.update(None, torch.randn(1, 20, 6))
    with pytest.raises(ConsistencyError, match=r"ChunkMean\(TransMIL\) is not.*Give each set in one piece"):
        model.encoder.update(state, torch.randn(1, 20, 6))
    task = Mil(bags=needles(), count=4)
    config = TrainConfig("mil", "transmil", model_options={"widths": [16]}, steps=1, batch=2, tensorboard=False)
    with pytest.raises(ConsistencyError, match="transmil is not mini-batch consistent"):
        Trainer(task, config, "unused", shown=False)


@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_branches_of_clam_are_attention_and_a_classifier_for_each_class(outputs):
    """clam-mb by its formula, in one pass over plain tensors; one output is the difference of two classes."""
    torch.manual_seed(0)
    model = MODELS["clam-mb"](in_dim=6, outputs=outputs).double().eval()
    pool, decoder = model.encoder.pool, model.head.decoder
    x = torch.randn(40, 6, dtype=torch.float64)
    h = model.encoder.phi(x)
    assert (pool.in_dim, pool.hidden, pool.branches) == (512, 256, max(outputs, 2))
    weights = pool.score(pool.content(h) * pool.gate(h)).softmax(0)
    logits = torch.stack([weights[:, c] @ h @ decoder.weight[c] + decoder.bias[c] for c in range(pool.branches)])
    expected = logits if outputs > 1 else logits[1:] - logits[:1]
    torch.testing.assert_close(model(x[None])[0], expected)
    if outputs == 1:
        torch.testing.assert_close(model(x[None])[0].sigmoid(), logits.softmax(0)[1:])


def test_branches_of_acmil_have_classifiers_while_training():
    torch.manual_seed(0)
    model = MODELS["acmil"](in_dim=6, widths=[8]).double().eval()
    x = torch.randn(2, 40, 6, dtype=torch.float64)
    z = model.encoder(x)
    assert z.shape == (2, 5, 8)
    torch.testing.assert_close(model(x), model.head.decoder.bag(z.mean(1)))
    trained = model.train()(x)
    assert trained.shape == (2, 6)
    torch.testing.assert_close(trained[:, 5:], model.eval()(x))
    one = model.head.decoder
    torch.testing.assert_close(trained[:, 2], z[:, 2] @ one.weight[2] + one.bias[2])


def test_published_widths_are_the_default():
    widths = {name: MODELS[name](in_dim=6).encoder.pool.in_dim for name in ("ab-mil", "clam-sb", "acmil", "simlp", "transmil")}
    assert widths == {"ab-mil": 128, "clam-sb": 512, "acmil": 512, "simlp": 6, "transmil": 512}
    x = torch.randn(1, 9, 6)
    torch.testing.assert_close(MODELS["ab-mil"](in_dim=6, widths=[], outputs=0, branches=2)(x).shape, torch.Size([1, 12]))
    simlp = MODELS["simlp"](in_dim=6)
    torch.testing.assert_close(simlp(x), simlp.head.decoder(x.mean(1)))


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("umbc")])
def test_both_streams_may_read_the_features_themselves(name):
    model = MODELS[name](in_dim=256, widths=[], out_dim=128, two_stream=True, dropout=0.5, num_slots=4)
    assert not [layer for layer in model.encoder.phi.modules() if isinstance(layer, nn.Linear)]
    x = torch.randn(2, 30, 256)
    assert model.eval()(x).shape == (2, 2)
    assert torch.equal(model.encoder.phi(x[0]), x[0])
    dropped = model.train().encoder.phi(x[0]) == 0
    assert 0.4 < float(dropped.float().mean()) < 0.6


def test_what_0_1_saved_of_sse_is_not_normalised(tmp_path):
    """0.1 had another default, and did not write its version."""
    torch.manual_seed(0)
    model = Mil(bags=needles(), count=4).build("sse", normalise=False, num_slots=4).eval()
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    del config["version"], config["options"]["normalise"]
    file.write_text(json.dumps(config))
    x = torch.randn(1, 9, 6)
    torch.testing.assert_close(ss.SetModel.from_pretrained(tmp_path / "model")(x), model(x))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(TrainConfig("mil", "sse", steps=1).to_dict()))
    for version, options in {"0.1.0": {"normalise": False}, "0.2.0": {}}.items():
        (run / "environment.json").write_text(json.dumps({"setstream": version}))
        assert read_run(run).model_options == options


def test_the_threshold_of_the_paper_is_chosen_on_the_bags_that_it_reports():
    task = Mil(bags=needles(), count=4, threshold="reported")
    model = task.build("deepsets").eval()
    probability = task.probabilities(model, task.test.bags)
    metrics = task.evaluate(model)
    assert metrics["threshold"] == best_threshold(probability, task.test.labels, balanced=True)
    assert metrics["accuracy"] >= Mil(bags=needles(), count=4).evaluate(model)["accuracy"]
    with pytest.raises(ConfigurationError, match="threshold is validation or reported; got 'best'"):
        Mil(bags=needles(), threshold="best")


def test_youdens_threshold():
    """Nine negative bags and one positive: all negative is right in 9 of 10, and useless."""
    probability, label = torch.tensor([0.5] * 7 + [0.6] * 3), torch.tensor([0] * 9 + [1])
    assert best_threshold(probability, label) > 0.6
    assert best_threshold(probability, label, balanced=True) == pytest.approx(0.55)


@pytest.mark.parametrize("grad_chunks", [1, 2, 3])
def test_the_gradient_of_both_streams_is_unbiased(grad_chunks):
    """4,000 draws, largest z over all parameters below the bound for their number."""
    torch.manual_seed(0)
    pool = ss.Parallel(instance=ss.Projected(nn.Linear(8, 1), ss.DeepSets("max")), bag=ss.UMBC(8, num_slots=2))
    encoder = ss.SetEncoder(nn.Sequential(nn.Linear(3, 8), nn.Tanh()), pool)
    sets = [torch.randn(n, 3) for n in (11, 7)]
    check_unbiased(encoder, sets, chunk_size=3, partition="random", grad_chunks=grad_chunks)
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


def test_thresholds():
    probability, label = torch.tensor([0.1, 0.2, 0.3, 0.35]), torch.tensor([0, 0, 1, 1])
    assert 0.2 < best_threshold(probability, label) < 0.3


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


def tiny_backbone():
    """Three features of an image: how much of each colour is brighter than half."""
    net = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with torch.no_grad():
        net[0].weight.copy_(torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(0)) / 8)
        net[0].bias.zero_()
    return Scaled(net, 8)


class Scaled(nn.Module):
    def __init__(self, net, out_dim):
        super().__init__()
        self.net, self.out_dim = net, out_dim

    def forward(self, x):
        return self.net(x.to(self.net[0].weight.dtype) / 255)


@pytest.fixture(scope="module")
def patches(tmp_path_factory):
    """24 bags of 20 to 60 images of 8x8 in files, half of them with one image that is redder; their features; their labels."""
    folder = tmp_path_factory.mktemp("patches")
    (folder / "images").mkdir()
    (folder / "features").mkdir()
    generator = np.random.default_rng(0)
    net = tiny_backbone()
    rows = ["slide_id,label"]
    for number in range(24):
        images = generator.integers(0, 200, (int(generator.integers(20, 60)), 3, 8, 8), dtype=np.uint8)
        if number % 2:
            images[3, 0] = 255
        np.save(folder / "images" / f"bag{number:02d}.npy", images)
        with torch.no_grad():
            np.save(folder / "features" / f"bag{number:02d}.npy", net(torch.from_numpy(images)).numpy())
        rows.append(f"bag{number:02d},{'tumor' if number % 2 else 'normal'}")
    (folder / "labels.csv").write_text("\n".join(rows))
    return folder


def stored_task(patches, kind, **options):
    standard = {"labels": str(patches / "labels.csv"), "positive": "tumor", "count": 3, "test_chunk": 16}
    return Mil(data=str(patches / kind), **(standard | options))


HEAD = {"widths": [16], "num_slots": 4, "two_stream": True}
IMAGES = HEAD | {"backbone": f"{__name__}:tiny_backbone"}


@pytest.mark.parametrize("gradient", ["unbiased", "importance", "exact", "subset"])
def test_two_stages_from_stored_features_to_the_backbone(patches, tmp_path, gradient):
    one = TrainConfig(
        "mil", "umbc+set-transformer", model_options=HEAD, steps=60, batch=2, lr=3e-3, gradient="full", tensorboard=False
    )
    Trainer(stored_task(patches, "features"), one, tmp_path / "one", shown=False).run()
    two = TrainConfig(
        "mil",
        "umbc+set-transformer",
        model_options=IMAGES,
        steps=8,
        batch=2,
        lr=1e-2,
        optimizer="adamw",
        weight_decay=1e-2,
        schedule="cosine",
        warmup=2,
        gradient=gradient,
        chunk_size=8,
        tensorboard=False,
        init_from=str(tmp_path / "one"),
        freeze=["head", "encoder.pool", "encoder.phi.layers"],
    )
    trainer = Trainer(stored_task(patches, "images"), two, tmp_path / "two", shown=False)
    initial = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    result = trainer.run()
    before, after = load_file(tmp_path / "one" / "model.safetensors"), load_file(tmp_path / "two" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert set(after) - set(before) == {"encoder.phi.backbone.net.0.weight", "encoder.phi.backbone.net.0.bias"}
    assert all(not torch.equal(initial[name], after[name]) for name in set(after) - set(before))
    assert 0 <= result.metrics["auroc"] <= 1


def test_images_served_from_files_have_the_gradient_of_images_in_memory(patches):
    task = stored_task(patches, "images")
    torch.manual_seed(0)
    model = task.build("umbc+set-transformer", **IMAGES).double().eval()
    batch = task.batch(0, 3, torch.Generator())
    in_memory = batch | {"bags": [bag.tensor() for bag in batch["bags"]]}
    found = []
    for own, encode in ((batch, Encode("exact", chunk_size=7)), (in_memory, Encode("full"))):
        model.zero_grad()
        task.loss(model, own, encode).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-9, atol=1e-12)


def test_served_bags_are_tested_like_bags_in_memory(patches):
    task = stored_task(patches, "images")
    model = task.build("umbc+set-transformer", **IMAGES).eval()
    served = task.probabilities(model, task.test.bags)
    torch.testing.assert_close(served, task.probabilities(model, task.test.tensors()))
    whole = task.build("ds-mil", widths=[16], backbone=f"{__name__}:tiny_backbone").eval()
    with torch.no_grad():
        expected = torch.cat([whole([bag.tensor()]).sigmoid().mean(1) for bag in task.test.bags])
    torch.testing.assert_close(task.probabilities(whole, task.test.bags), expected)


def test_splits_from_a_file(patches, tmp_path):
    names = [f"bag{number:02d}" for number in range(24)]
    rows = [f"{name},{'train' if n < 12 else 'val' if n < 16 else 'test'}" for n, name in enumerate(names)]
    (tmp_path / "split.csv").write_text("\n".join(["slide_id,split", *rows]))
    task = stored_task(patches, "features", split=str(tmp_path / "split.csv"))
    assert [len(task.train), len(task.val), len(task.test)] == [12, 4, 8]
    assert [bag.id for bag in task.test.bags] == names[16:]
    assert len(stored_task(patches, "features", split=str(tmp_path / "split.csv"), validation=0.2).val) == 4  # the split's own
    with pytest.raises(ConfigurationError, match="share from 0 to 0.5.*got 0.9"):
        stored_task(patches, "features", validation=0.9)


def test_labels_that_are_not_two_are_explained(patches):
    with pytest.raises(DataError, match="both labels, 0 and 1; got normal, tumor"):
        stored_task(patches, "features", positive=None)
    with pytest.raises(DataError, match="got normal, tumor"):
        stored_task(patches, "features", positive="cancer")
    with pytest.raises(ConfigurationError, match="need a backbone"):
        stored_task(patches, "images").build("umbc+set-transformer", **HEAD)


def test_the_threshold_comes_from_the_validation_bags():
    task = Mil(bags=needles(60), count=3, validation=0.25)
    assert [len(task.train), len(task.val), len(task.test)] == [30, 10, 20]
    model = task.build("deepsets", widths=[8]).eval()
    with torch.no_grad():
        model.head.decoder[-1].bias.fill_(-9.0)  # all probabilities far below a half
    found = task.evaluate(model)
    expected = best_threshold(task.probabilities(model, task.val.bags), task.val.labels)
    assert found["threshold"] == expected < 0.5
    assert found["accuracy_low"] <= found["accuracy"] <= found["accuracy_high"]
    assert task.evaluate(model, quick=True)["threshold"] == expected


def test_class_weights_make_both_classes_count_alike():
    bags = needles(40)
    few = bags.select([i for i in range(40) if bags.labels[i] == 0 or i < 8])  # 20 negative, 4 positive
    task = Mil(bags=few, count=2, class_weights=True)
    share = float(task.train.labels.float().mean())
    assert task.target.weights == pytest.approx((0.5 / (1 - share), 0.5 / share))
    model = task.build("deepsets", widths=[8]).eval()
    whole = {"bags": task.train.bags, "label": task.train.labels.float()}
    logits = model(task.train.tensors())
    each = nn.functional.binary_cross_entropy_with_logits(logits[:, 0], whole["label"], reduction="none")
    balanced = (each[whole["label"] > 0].mean() + each[whole["label"] == 0].mean()) / 2
    torch.testing.assert_close(task.loss(model, whole, Encode("full")), balanced)


def test_intervals_cover_what_they_should():
    """Bags drawn anew from a known distribution: 60 intervals of 90 % miss the truth at most 15 times (z below 4)."""
    generator = torch.Generator().manual_seed(0)
    missed = 0
    for trial in range(60):
        label = torch.randint(0, 2, (100,), generator=generator)
        probability = torch.where(torch.rand(100, generator=generator) < 0.8, label, 1 - label).float()
        found = intervals(lambda rows: summary(probability[rows], label[rows]), 100, ["accuracy"], 60, trial, 0.9)  # noqa: B023
        missed += not found["accuracy_low"] <= 0.8 <= found["accuracy_high"]
    assert 1 <= missed <= 15


def test_a_cross_validation_is_summed_up_by_means_and_intervals():
    found = [{"accuracy": value, "auroc": 1.0} for value in (0.5, 0.7, 0.9, 0.7)]
    del found[2]["auroc"]  # a fold of one class has none
    rows = summarise(found, repeats=2)
    values = torch.tensor([0.5, 0.7, 0.9, 0.7])
    half = 1.96 * float(values.std()) / 2
    assert rows["accuracy"]["mean"] == pytest.approx(0.7)
    assert rows["accuracy"]["over_repeats"] == pytest.approx(0.1414, abs=1e-4)
    assert (rows["accuracy"]["low"], rows["accuracy"]["high"]) == pytest.approx((0.7 - half, 0.7 + half))
    assert "auroc" not in rows
