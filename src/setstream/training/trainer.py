"""The trainer: batches, steps, checkpoints, in a folder that holds everything needed to repeat the run.

    run/config.json          every option
        environment.json     versions and hardware
        metrics.jsonl        loss by step, metrics now and then          (tensorboard/ the same)
        checkpoints/         the last two                                (failed/ where a loss was not finite)
        model.safetensors    the weights at the end
        best.safetensors     the weights of the best evaluation          (with `select`)
        result.json          the test metrics at the end, and how long it took

A step's random numbers depend on seed and step alone, so a run that was killed and resumed ends with the same weights, bit for
bit, as one that was not.
"""

import json
import math
import threading
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from setstream._utils.atomic import locked, write_atomically
from setstream._utils.threads import threads
from setstream.errors import ConfigurationError, ConsistencyError, NonFiniteError
from setstream.models.model import SetModel
from setstream.models.weights import load_weights, save_weights
from setstream.training.checkpoint import Checkpoints, begin_with, freeze, make_optimizer, train_mode
from setstream.training.config import TrainConfig, read_options
from setstream.training.processes import Processes, asked_to_stop, choose_device, keep_freed_memory
from setstream.training.record import Metrics, Progress, environment, resident
from setstream.training.task import Batch, Encode, Task, mix, seed_step

BEST = "best.safetensors"
# Models with fewer weights train with one thread: two runs at a time use two cores better than two threads.
SMALL = 2**20


@dataclass(frozen=True)
class Result:
    """How a run ended: the step it reached, its test metrics if it is done, and its folder."""

    step: int
    done: bool
    metrics: dict[str, float]
    folder: Path


class _Step(nn.Module):
    """Model and loss as one module, so that DistributedDataParallel sees the forward pass that it wraps."""

    def __init__(self, task: Task, model: SetModel, encode: Encode) -> None:
        super().__init__()
        self.model, self._task, self._encode = model, task, encode

    def forward(self, batch: Batch) -> Tensor:
        return self._task.loss(self.model, batch, self._encode)


class Trainer:
    """Trains one model of a task in a folder, or resumes the run that the folder holds.

    >>> import tempfile
    >>> from setstream.tasks.clustering import Clustering
    >>> config = TrainConfig(task="clustering", model="deepsets", steps=3, batch=2, tensorboard=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = Trainer(Clustering(points=32, test_sets=4), config, folder, shown=False).run()
    >>> result.done, result.step
    (True, 3)
    """

    def __init__(self, task: Task, config: TrainConfig, folder: str | Path, *, shown: bool = True) -> None:
        self.task, self.folder, self.shown = task.with_seed(config.seed), Path(folder), shown
        self.config = config = config.in_steps(self.task.size)
        self.device = choose_device(config.device)
        self.processes = Processes.join(self.device)
        keep_freed_memory()
        self.checkpoints = Checkpoints(self.folder / "checkpoints")
        torch.manual_seed(config.seed)
        self.model = self.task.build(config.model, **config.model_options).to(self.device)
        self._check_shares()
        self._check_chunks()
        freeze(self.model, config.freeze)
        self.optimizer = make_optimizer(self.model, config, self.device)
        self.step = 0
        self.losses: list[float] = []  # since the last line of the log
        self.best: float | None = None  # the largest value of the metric that selects
        self.stale = 0  # evaluations since then
        self._stop = threading.Event()

    def run(self, *, resume: bool = True) -> Result:
        """Train to the end, or until interrupted (Ctrl-C or SIGTERM save and stop)."""
        # Two processes that train in one folder would overwrite each other's checkpoints.
        lock = locked(self.folder, "training") if self.processes.first else nullcontext()
        small = sum(parameter.numel() for parameter in self.model.parameters()) < SMALL
        with lock, threads(self.config.threads or (1 if small else None)):
            return self._open(resume) or self._train()

    def _open(self, resume: bool) -> Result | None:
        """Make the run folder, or resume the run in it; the result of a run that is finished already."""
        options = self.folder / "config.json"
        if options.exists():
            if not resume:
                raise ConfigurationError(f"{self.folder} already holds a run: resume it, or choose another folder")
            earlier = read_options(options)
            if changed := self.config.changed_since(earlier):
                changes = ", ".join(f"{name}: {earlier[name]!r} before, {getattr(self.config, name)!r} now" for name in changed)
                raise ConfigurationError(f"{self.folder} holds a run with other options ({changes}): choose another folder")
            if (self.folder / "result.json").exists():
                result = read_options(self.folder / "result.json")
                load_weights(self.model, self.folder / "model.safetensors")
                self.step = result["step"]
                return Result(self.step, True, result["metrics"], self.folder)
        damaged = self.checkpoints.damaged()
        self.processes.wait()
        if self.processes.first:
            for step, problem in damaged.items():
                kept = self.checkpoints.keep_damaged(step)
                warnings.warn(f"the checkpoint of step {step} is damaged and kept as {kept}: {problem}", stacklevel=2)
            write_atomically(options, json.dumps(self.config.to_dict(), indent=2))
            write_atomically(self.folder / "environment.json", json.dumps(environment(self.device), indent=2))
        self.processes.wait()
        if steps := self.checkpoints.steps():
            progress = self.checkpoints.load(steps[-1], self.model, self.optimizer, self.device)
            self.step, self.losses, self.best = int(progress["step"]), progress.get("losses", []), progress.get("best")
            self.stale = progress.get("stale", 0)
        elif self.config.init_from is not None:
            begin_with(self.model, self.config.init_from, self.config.freeze)
        self.processes.wait()
        return None

    def _check_shares(self) -> None:
        """A loss that compares the sets of a batch needs all of them in every process."""
        if self.task.compares and self.config.parallel == "data" and self.processes.world > 1:
            raise ConfigurationError(
                f"the loss of this {self.config.task} task compares the sets of a batch, and with parallel = data each of the "
                f"{self.processes.world} processes would compare a share of them only: use --parallel set, which gives every "
                "process a part of every set, and the gradient of one process"
            )

    def _check_chunks(self) -> None:
        """A model that is not consistent is trained on whole sets, unless the mean over chunks was requested."""
        config, pool = self.config, self.model.encoder.pool
        cut = config.gradient not in ("full", "subset") or (config.parallel == "set" and self.processes.world > 1)
        if cut and pool.refuse_chunks(config.chunks):
            raise ConsistencyError(
                f"{config.model} is not mini-batch consistent: with gradient = {config.gradient} and parallel = "
                f"{config.parallel} it would be trained on pieces of its sets, as another model. Train it with --gradient full "
                "on whole sets (subset: on a part of them), or, if you want the mean over chunks, with -o chunks=average"
            )

    def _train(self) -> Result:
        config, processes, first_step, began = self.config, self.processes, self.step, time.monotonic()
        group = processes.group if config.parallel == "set" else None
        encode = Encode(config.gradient, config.chunk_size, config.grad_chunks, group, config.features, config.chunks)
        module: nn.Module = _Step(self.task, self.model, encode)
        if processes.world > 1 and config.parallel == "data":
            module = DistributedDataParallel(module)
        metrics = Metrics(self.folder, config.tensorboard, self.step, processes.first)
        title, shown = f"{config.task}/{config.model}", self.shown and processes.first
        progress = Progress(config.steps, title, self.step, shown, position=config.position)
        train_mode(self.model, config.freeze)
        with metrics, progress, asked_to_stop(self._stop):
            while not self._ended() and not processes.any(self._stop.is_set()):
                self.losses.append(self._train_step(module))
                self.step += 1
                last = self.step == config.steps
                if last or self.step % config.log_every == 0:
                    loss = sum(self.losses) / len(self.losses)
                    self.losses.clear()
                    metrics.write(
                        self.step,
                        "train",
                        config.epoch(self.step) | {"loss": loss, "lr": config.rate(self.step - 1)} | resident(),
                    )
                    progress.update(self.step, loss)
                if config.select if last else self.step % config.evaluate_every == 0:
                    scores = self._evaluate(quick=True)
                    metrics.write(self.step, self.task.held_out, config.epoch(self.step) | scores)
                    progress.say(f"{config.position(self.step)}  {self.task.held_out}  {_text(scores | resident())}")
                # Last: a run that is resumed from here finds everything of this step written.
                if last or self.step % config.checkpoint_every == 0:
                    self._save()
            seconds = time.monotonic() - began
            if not self._ended():
                self._save()
                progress.say(f"stopped at {config.position(self.step)}; run it again to resume")
                return Result(self.step, False, {}, self.folder)
            if self.best is not None:  # on the process that evaluates
                load_weights(self.model, self.folder / BEST)
            final = self._evaluate(quick=False)
            metrics.write(self.step, "final", final)
            if processes.first:
                save_weights(self.model, self.folder / "model.safetensors")
                result = {"step": self.step, "metrics": final, "seconds": seconds, "steps_timed": self.step - first_step}
                write_atomically(self.folder / "result.json", json.dumps(result, indent=2))
            progress.say(f"done  {_text(final)}")
        return Result(self.step, True, final, self.folder)

    def _ended(self) -> bool:
        """Whether all steps are done, or the run has lost its patience."""
        patience = self.config.patience
        return self.step >= self.config.steps or self.processes.any(patience is not None and self.stale >= patience)

    def _train_step(self, module: nn.Module) -> float:
        config, processes = self.config, self.processes
        generator = torch.Generator().manual_seed(mix(config.seed, self.step, 0, 2))  # the same on every rank
        batch = self.task.batch(self.step, config.batch, generator)
        if config.parallel == "data":
            batch = processes.share(batch, config.batch)
        # With every set over all processes, all must draw the same numbers; otherwise each has sets and draws of its own.
        seed_step(config.seed, self.step, processes.rank if config.parallel == "data" else 0, self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = config.rate(self.step)
        self.optimizer.zero_grad()
        try:
            with nullcontext() if config.amp == "none" else torch.autocast(self.device.type, dtype=torch.bfloat16):
                loss = module(tree_map_only(Tensor, lambda x: x.to(self.device, non_blocking=True), batch))
            value = float(loss.detach())
            if not math.isfinite(value):
                raise NonFiniteError(f"the loss is {value}.")
            loss.backward()
            norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
            if not math.isfinite(float(norm)):
                raise NonFiniteError(f"the loss is {value}, and its gradient is not finite.")
        except NonFiniteError as error:
            failed = Checkpoints(self.folder / "failed")
            if processes.first:
                failed.save(self.step, self.model, self.optimizer, {"seed": config.seed})
            raise NonFiniteError(
                f"at step {self.step}: {error} The state before this step is in {failed.place(self.step)}; try a smaller "
                "learning rate, clipping (clip), or a warm-up."
            ) from error
        if config.clip is not None:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), config.clip, norm)
        self.optimizer.step()
        return value

    def _evaluate(self, quick: bool) -> dict[str, float]:
        """Test metrics, on the first process; the others wait. Keeps the weights if a quick evaluation is the best so far."""
        scores: dict[str, float] = {}
        if self.processes.first:
            self.model.eval()
            with torch.no_grad():
                scores = self.task.evaluate(self.model, quick=True) if quick else self.task.conclude(self.model, self.folder)
            train_mode(self.model, self.config.freeze)
            if quick and (select := self.config.select) is not None:
                if (name := select.removeprefix("-")) not in scores:
                    raise ConfigurationError(f"select: the evaluation has no {name!r}; it has {', '.join(scores)}")
                value, self.stale = -scores[name] if select != name else scores[name], self.stale + 1
                if self.best is None or value > self.best:
                    self.best, self.stale = value, 0
                    save_weights(self.model, self.folder / BEST)
        self.processes.wait()
        return scores

    def _save(self) -> None:
        if self.processes.first:
            progress = {"seed": self.config.seed, "losses": self.losses, "best": self.best, "stale": self.stale}
            self.checkpoints.save(self.step, self.model, self.optimizer, progress)
        self.processes.wait()


def _text(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
