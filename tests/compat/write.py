"""Write golden files with the setstream that is installed: `python -m tests.compat.write tests/compat/VERSION`.

Once for each release, and never again: later versions must read what this one wrote.

    states/NAME.safetensors        the state of `elements(1)` and `elements(2)`, merged    NAME.weights.safetensors: its encoder
    store.sqlite                   a store with the sets "a" and "b"                       store.weights.safetensors: its model
    run/                           the folder of a training run that was finished
    interrupted/                   the folder of one that was not
    models/NAME/                   models as `save_pretrained` writes them
    answers.safetensors            what each of them said
"""

import shutil
import sys
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file

import setstream as ss
from setstream.integrations.sklearn import SetClassifier
from setstream.tasks.clustering import Clustering
from setstream.tasks.mil.models import MODELS
from setstream.training import TrainConfig, Trainer
from tests.compat import encoders

SAVED = {
    "umbc+set-transformer": {"in_dim": 3, "widths": [8], "num_slots": 4, "two_stream": True},
    "ab-mil": {"in_dim": 3, "widths": [8]},
    "deepsets": {"backbone": "small", "backbone_options": {"width": 8}},
}


def write(folder: Path) -> None:
    """All golden files."""
    torch.manual_seed(0)
    answers: dict[str, torch.Tensor] = {}
    (folder / "states").mkdir(parents=True)
    with torch.no_grad():
        for name in encoders.POOLS:
            encoder = encoders.build(name)
            encoder.phi[0].fit([encoders.elements(3)[0]])
            state = encoder.update(None, encoders.elements(1)) + encoder.update(None, encoders.elements(2))
            state.save(folder / "states" / f"{name}.safetensors")
            save_file(encoder.state_dict(), folder / "states" / f"{name}.weights.safetensors")
            z = encoder.finalize(state, chunks="average")
            answers |= {f"states/{name}/{k}": v for k, v in z.items()} if isinstance(z, dict) else {f"states/{name}": z}

        model = encoders.model()
        save_file(model.state_dict(), folder / "store.weights.safetensors")
        with ss.StateStore(folder / "store.sqlite", model) as store:
            store.update("a", encoders.elements(1)[0])
            store.update("b", encoders.elements(2)[0])
            answers |= {f"store/{id}": store.predict(id) for id in "ab"}

        for name, options in SAVED.items():
            built = MODELS[name](**options).eval()
            built.save_pretrained(folder / "models" / name, builder=MODELS[name], options=options)
            answers[f"models/{name}"] = built(bag(options))

    classifier = SetClassifier(widths=(8, 8), num_slots=4, min_steps=5, epochs=1, random_state=0)
    classifier.fit([encoders.elements(seed)[0].numpy() for seed in range(4)], [0, 1, 0, 1])
    classifier.model_.save_pretrained(folder / "models" / "classifier")
    answers["models/classifier"] = classifier.model_(encoders.elements(1)).detach()

    task = Clustering(points=32, test_sets=4)
    config = TrainConfig(
        task="clustering", model="deepsets", steps=4, batch=2, tensorboard=False, device="cpu", checkpoint_every=2,
        task_options={"points": 32, "test_sets": 4},
    )  # fmt: skip
    trainer = Trainer(task, config, folder / "run", shown=False)
    trainer.run()
    answers["run"] = trainer.model.eval()(torch.ones(1, 9, 2)).means.detach()
    halted = Trainer(Clustering(points=32, test_sets=4), config, folder / "interrupted", shown=False)
    real = halted._train_step

    def two_steps(module: torch.nn.Module) -> float:
        if halted.step == 2:
            raise KeyboardInterrupt
        return real(module)

    halted._train_step = two_steps  # type: ignore[method-assign]
    with suppress(KeyboardInterrupt):
        halted.run()
    shutil.rmtree(folder / "run" / "checkpoints")  # to be small: the finished weights stand beside them
    save_file({name: tensor.contiguous() for name, tensor in answers.items()}, folder / "answers.safetensors")


def bag(options: dict[str, object]) -> torch.Tensor:
    if "backbone" in options:
        return torch.arange(3 * 3 * 8 * 8).reshape(1, 3, 3, 8, 8).remainder(251).to(torch.uint8)
    return encoders.elements(1)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
