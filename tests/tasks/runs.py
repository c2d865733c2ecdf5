"""Small finished runs that reports are made of."""

from setstream.training import TrainConfig, Trainer
from setstream.training.task import build_task

SMALL_CLUSTERING = {"points": 32, "test_sets": 4, "test_points": 16}
CLUSTERING = [
    ("deepsets", 0, "unbiased", {}, {}),
    ("deepsets", 1, "unbiased", {}, {}),
    ("umbc+set-transformer", 0, "unbiased", {}, {}),
    ("umbc+set-transformer", 0, "full", {}, {}),
    ("umbc+set-transformer", 0, "unbiased", {"activation": "sigmoid"}, {}),
    ("set-transformer", 0, "subset", {}, {}),
    ("deepsets", 0, "unbiased", {}, {"dim": 3, "clusters": 5}),
]
COMPLETION = [
    ("umbc+set-transformer", "unbiased", {}),
    ("umbc+set-transformer", "full", {}),
    ("set-transformer", "subset", {}),
    ("deepsets", "unbiased", {}),
    ("deepsets", "unbiased", {"init": "he"}),
    ("umbc+anchors", "unbiased", {"num_slots": 4}),
]


def train(config, folder, task=None):
    """Train, and give the result."""
    return Trainer(task or build_task(config), config, folder, shown=False).run()


def train_clustering(folder):
    """Seven runs of two steps."""
    for number, (model, seed, gradient, options, other) in enumerate(CLUSTERING):
        config = TrainConfig(
            *("clustering", model, SMALL_CLUSTERING | other, options),
            **{"steps": 2, "batch": 2, "seed": seed, "gradient": gradient, "tensorboard": False},
        )
        train(config, folder / str(number))
    return folder


def train_completion(pictures, folder):
    """Six runs of one step on a folder of 8x8 pictures."""
    options = {"data": "folder", "folder": str(pictures), "side": 8, "fewest": 5, "most": 20, "test_contexts": [5, 20]}
    for number, (model, gradient, built) in enumerate(COMPLETION):
        config = TrainConfig(
            "completion", model, options, built, steps=1, batch=2, gradient=gradient, chunk_size=5, tensorboard=False
        )
        train(config, folder / str(number))
    return folder
