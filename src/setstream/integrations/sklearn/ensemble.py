"""How a network of several members is fitted: each on a part of the sets; the rest tells how much to trust which stream::

    fold m of M     member m learns from the others, stops by fold m, and answers it: rows (N, S, outputs), each set by a
                    member that has not learned from it
    linear path     min_W Σ_i w_i loss(W t_i + b) + λ |W|² / 2       solved, not sampled; λ: the best on the folds
    trust           min_{a ≥ 0, c} Σ_i w_i loss(Σ_s a_s rows_is + c) + ρ |a - 1/S|²      on the rows of the folds

a has no given sum: for classes, it also calibrates, as a temperature does. With one member, one part of the sets is held out;
if none is, all streams have the same trust.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.model_selection import KFold, StratifiedKFold
from torch import Tensor, nn

from setstream.integrations.sklearn.fitting import MOST, TOLERANCE, batches, encode_sets, sampled
from setstream.integrations.sklearn.network import EnsembleHead, Shares, statistics_of
from setstream.integrations.sklearn.sets import Sources
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.models.stream import evaluating
from setstream.nn.standardise import Standardise
from setstream.pools import Parallel, Projected
from setstream.pools.base import Pool
from setstream.sets.partition import runs
from setstream.training.checkpoint import make_optimizer
from setstream.training.config import TrainConfig
from setstream.training.record import Progress
from setstream.training.task import Encode, in_epochs, mix, seed_step

#: (rows (B, S, outputs), targets) -> the loss of each row (B, S)
RowLoss = Callable[[Tensor, Tensor], Tensor]
Fold = tuple[np.ndarray, np.ndarray]
PENALTIES = (1000.0, 100.0, 10.0, 1.0, 0.1)  # λ
SHRINK = 5.0  # ρ
MOST_NUMBERS = 2**27  # of elements in memory
ELEMENTS, NUMBERS = 20_000, 2**24  # at most, for the levels of the shares
SMOOTH = 0.9  # of the shown loss


def class_rows(rows: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of log-probabilities or logits."""
    streams = rows.shape[1]
    each = F.cross_entropy(rows.flatten(0, 1), target.repeat_interleave(streams), reduction="none")
    return each.view(-1, streams)


def number_rows(rows: Tensor, target: Tensor) -> Tensor:
    """Squared errors, averaged over the outputs."""
    return (rows - target.unsqueeze(1)).square().mean(-1)


@dataclass(frozen=True)
class Plan:
    """How to train: steps and rate are those of one member; `patience` None: never stop early."""

    steps: int
    batch: int
    rate: float
    weight_decay: float
    patience: int | None
    seed: int


def split(count: int, members: int, share: float, strata: np.ndarray | None, seed: int) -> list[Fold]:
    """Folds for the members; of a single member, `share` of the sets are held out, or none."""
    everything = np.arange(count)
    parts = members if members > 1 else max(2, round(1 / share)) if share else 0
    if not parts or parts > count:
        return [(everything, everything[:0])] * members
    kinds = StratifiedKFold if strata is not None and np.bincount(strata).max() >= parts else KFold
    with warnings.catch_warnings(action="ignore"):  # about classes with fewer sets than folds
        folds = list(kinds(parts, shuffle=True, random_state=seed % 2**32).split(everything, strata))
    return folds[:members]


class Packed:
    """Sets in memory, standardised once, as one table: batches of them are padded, and read without looking at them again."""

    def __init__(self, sets: Sources, scale: Standardise, device: torch.device) -> None:
        self.lengths = torch.tensor([len(one) for one in sets], device=device)
        self.starts = self.lengths.cumsum(0) - self.lengths
        with torch.no_grad():
            self.rows = scale(torch.cat([one.tensor().to(device, torch.float32) for one in sets]))

    def encode(self, layers: nn.Module, pool: Pool, picked: Tensor) -> Any:
        """z of these sets: the layers on their elements, then the pool."""
        lengths = self.lengths[picked]
        places = torch.arange(max(1, int(lengths.max())), device=lengths.device)
        mask = None if bool((lengths == len(places)).all()) else places < lengths[:, None]  # (B, n)
        rows = self.rows[(self.starts[picked, None] + places).clamp(max=len(self.rows) - 1)]
        return pool(layers(rows), mask)


class Members:
    """A network and the sets that it learns from."""

    def __init__(
        self, model: SetModel, encode: Encode, sets: Sources, targets: Tensor, weights: Tensor, loss: RowLoss, plan: Plan
    ) -> None:
        self.model, self.encode, self.sets, self.plan, self.loss = model, encode, sets, plan, loss
        self.head = cast(EnsembleHead, model.head)
        self.device = next(model.parameters()).device
        self.targets, self.weights = targets.to(self.device), weights.to(self.device)
        self.scale = cast(Standardise, model.encoder.phi.get_submodule("0"))
        pools = cast(Parallel, model.encoder.pool).pools
        self.pools = {name: cast(Projected, pool).pool for name, pool in pools.items()}
        lengths = [len(one) for one in sets]
        fits = max(lengths) <= encode.chunk_size and sum(lengths) * self.scale.out_features <= MOST_NUMBERS
        self.packed = Packed(sets, self.scale, self.device) if encode.gradient in ("auto", "full") and fits else None
        #: What draws the elements of large sets that a step reads; None: it reads all.
        self.samples = torch.default_generator if encode.gradient == "auto" and max(lengths) > MOST else None
        self.losses: list[float] = []
        self.tests: list[float] = []

    def fit(self, folds: Sequence[Fold], title: str | None) -> None:
        """Train every member, solve the linear path, and weigh the streams."""
        t = self.measure()
        rows: list[Tensor] = []
        with Progress(
            self.plan.steps * len(folds), title or "", shown=title is not None, every=max(1, self.plan.steps // 10)
        ) as bar:
            for number, (kept, held) in enumerate(folds):
                rows.append(self._train(number, kept, held, t, bar))
        held = np.concatenate([held for _, held in folds])
        with torch.no_grad():
            linear = self._solve(t, folds, held)
        if len(held):
            self._weigh(torch.cat([linear.unsqueeze(1), torch.cat(rows).double()], 1), held)
        self.model.eval()

    def measure(self) -> Tensor:
        """The statistics t of every set, in units of their spread over the sets, which the network keeps."""
        pools = {
            name: cast(Projected, self.model.encoder.pool.get_submodule(f"pools.{name}")) for name in ("statistics", "shares")
        }
        cast(Shares, pools["shares"].module).fit(self._some_elements())
        encoder = SetEncoder(self.scale, Parallel(**pools))
        encode = Encode("none", self.encode.chunk_size, 1)
        with evaluating(encoder):
            model = SetModel(encoder, nn.Identity())
            parts = [statistics_of(encode_sets(model, encode, self.sets[batch])) for batch in batches(self.sets, 4096)]
        t = torch.cat(parts)
        centre, spread = t.mean(0), t.std(0, correction=0)
        self.head.centre.copy_(centre)
        self.head.spread.copy_(torch.where(spread > 1e-6 * (1 + centre.abs()), spread, 1.0))
        return self.head.standardised(t)

    def _some_elements(self) -> Tensor:
        """About `ELEMENTS` standardised elements, of each set its share, at random."""
        total, generator = max(1, sum(map(len, self.sets))), torch.Generator().manual_seed(self.plan.seed)
        most, rows = min(ELEMENTS, NUMBERS // self.scale.out_features), []
        for one in self.sets:
            wanted = min(len(one), -(-most * len(one) // total))
            places = torch.randperm(len(one), generator=generator)[:wanted].sort().values
            rows.append(one.take(places).to(self.device, torch.float32))
        with torch.no_grad():
            return self.scale(torch.cat(rows))[:, : len(self.scale.mean)]

    def _member(self, number: int) -> SetModel:
        """One member as a model of its own: its modules are those of the network."""
        layers = cast(nn.ModuleList, self.model.encoder.phi.get_submodule("1.branches"))
        encoder = SetEncoder(nn.Sequential(self.scale, layers[number]), self.pools[f"member{number}"])
        return SetModel(encoder, self.head.members[number])

    def _read(
        self, member: SetModel, encode: Encode, picked: np.ndarray, t: Tensor, samples: torch.Generator | None = None
    ) -> Tensor:
        """The member's rows (B, S - 1, outputs) of these sets; with `samples`, of random elements of large ones."""
        if self.packed is None:
            given = [sampled(self.sets[i], samples) if samples else self.sets[i] for i in picked]
            return member.head(encode_sets(member, encode, given), t[picked])
        places = torch.from_numpy(picked).to(self.device)
        return member.head(self.packed.encode(member.encoder.phi.get_submodule("1"), member.encoder.pool, places), t[places])

    def _train(self, number: int, kept: np.ndarray, held: np.ndarray, t: Tensor, bar: Progress) -> Tensor:
        """Train a member on `kept`; its normalised rows of the sets in `held`, (held, S - 1, outputs)."""
        plan, device = self.plan, self.device
        member = self._member(number)
        modules = nn.ModuleList([member.encoder, member.head])
        size = min(plan.batch, len(kept))
        rates: dict[str, Any] = {"steps": plan.steps, "schedule": "cosine", "warmup": min(20, plan.steps // 10)}
        config = TrainConfig(
            "sklearn",
            "member",
            batch=size,
            lr=plan.rate,
            weight_decay=plan.weight_decay,
            final_factor=0.02,
            optimizer="adamw",
            **rates,
        )
        optimizer = make_optimizer(modules, config, device)
        epoch = -(-len(kept) // size)
        every = max(epoch, plan.steps // 25)
        best, lowest, waited, shown, summed = None, float("inf"), 0, 0.0, 0.0
        modules.train()
        seed = mix(plan.seed, number)
        for step in range(plan.steps):
            seed_step(seed, step, 0, device)
            for group in optimizer.param_groups:
                group["lr"] = config.rate(step)
            picked = kept[in_epochs(step, size, len(kept), seed)]
            each = self.loss(self._read(member, self.encode, picked, t, self.samples), self.targets[picked]).mean(1)
            loss = (each * self.weights[picked]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            value = loss.item()
            shown = value if step == 0 else SMOOTH * shown + (1 - SMOOTH) * value
            summed += value
            bar.update(number * plan.steps + step + 1, shown)
            if (step + 1) % every and step + 1 < plan.steps:
                continue
            self.losses.append(summed / (step % every + 1))
            summed = 0.0
            if not len(held) or plan.patience is None:
                continue
            same = torch.Generator().manual_seed(seed) if self.samples else None
            test = self._test(self._rows(member, held, t, same).mean(1, keepdim=True), held)
            self.tests.append(test)
            waited += 1
            if test < lowest - TOLERANCE:
                lowest, waited, best = test, 0, copy.deepcopy(modules.state_dict())
            if waited >= plan.patience:
                break
        if best is not None:
            modules.load_state_dict(best)
        return self._rows(member, held, t)

    @torch.no_grad()
    def _rows(self, member: SetModel, held: np.ndarray, t: Tensor, samples: torch.Generator | None = None) -> Tensor:
        """The member's normalised rows of these sets."""
        if not len(held):
            return t.new_zeros(0, len(self.head.trust) - 1, len(self.head.offset))
        encode = Encode("none", self.encode.chunk_size, 1)
        with evaluating(member):
            lengths = [len(self.sets[i]) for i in held]
            rows = [self._read(member, encode, held[part], t, samples) for part in runs(lengths, 8192, 256)]
        return self.head.normalise(torch.cat(rows))

    def _test(self, rows: Tensor, held: np.ndarray) -> float:
        each, weights = self.loss(rows, self.targets[held])[:, 0], self.weights[held]
        return float((each * weights).sum() / weights.sum().clamp(min=1e-12))

    def _solve(self, t: Tensor, folds: Sequence[Fold], held: np.ndarray) -> Tensor:
        """Solve the linear path for each penalty, keep the best; the normalised rows (held, outputs) of the folds."""
        x = t.double()
        # With more statistics than sets, the solution is a combination of the sets: a rotation leaves as many columns as sets.
        turn = torch.linalg.svd(x, full_matrices=False)[2].T if x.shape[1] > x.shape[0] else torch.eye(x.shape[1]).to(x)
        x = x @ turn
        answers: list[Tensor] = []
        for kept, rest in folds if len(held) else ():
            answers.append(torch.stack([affine(x[rest], solved) for solved in self._path(x, kept, PENALTIES)]))
        rows = torch.cat(answers, 1) if answers else x.new_zeros(1, 0, len(self.head.offset))  # (λ, held, outputs)
        rows = self.head.normalise(rows)
        tests = [self._test(one.unsqueeze(1), held) for one in rows] if len(held) else [0.0]
        best = int(np.argmin(tests)) if len(held) else PENALTIES.index(10.0)
        solved = self._path(x, np.arange(len(x)), PENALTIES[: best + 1])[-1]
        self.head.linear.weight.copy_((turn @ solved[:-1]).T)
        self.head.linear.bias.copy_(solved[-1])
        return rows[best if len(held) else 0]

    def _path(self, x: Tensor, kept: np.ndarray, penalties: Sequence[float]) -> list[Tensor]:
        """The solutions (columns + 1, outputs) for falling penalties, each from the one before."""
        x, target, weights = x[kept], self.targets[kept], self.weights[kept].double()
        if target.is_floating_point():
            return [ridge(x, target.double(), weights, penalty) for penalty in penalties]
        solved, found = x.new_zeros(x.shape[1] + 1, len(self.head.offset)), []
        for penalty in penalties:

            def objective(solution: Tensor, penalty: float = penalty) -> Tensor:
                each = F.cross_entropy(affine(x, solution), target, reduction="none")
                return (each * weights).sum() + 0.5 * penalty * solution[:-1].square().sum()

            solved = minimise(objective, solved)
            found.append(solved)
        return found

    def _weigh(self, rows: Tensor, held: np.ndarray) -> None:
        """Trust and offset from rows (held, S, outputs) of sets that their members have not learned from."""
        streams, target, weights = rows.shape[1], self.targets[held], self.weights[held].double()
        target = target.double() if target.is_floating_point() else target

        def objective(both: Tensor) -> Tensor:
            trust, offset = both[:streams].abs(), both[streams:]
            each = self.loss(((rows * trust[:, None]).sum(1) + offset).unsqueeze(1), target)[:, 0]
            pull = (trust - 1 / streams).square().sum() + (offset.square().sum() if len(offset) > 1 else 0.0)
            return (each * weights).sum() + SHRINK * pull

        start = rows.new_zeros(streams + rows.shape[2])
        start[:streams] = 1 / streams
        both = minimise(objective, start)
        self.head.trust.copy_(both[:streams].abs())
        self.head.offset.copy_(both[streams:])


def affine(x: Tensor, solution: Tensor) -> Tensor:
    """x W + b, with b the last row of the solution."""
    return x @ solution[:-1] + solution[-1]


def ridge(x: Tensor, target: Tensor, weights: Tensor, penalty: float) -> Tensor:
    """W and b of Σ_i w_i |W x_i + b - y_i|² + λ |W|²."""
    ones = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    weighed = ones * weights[:, None]
    penalties = torch.full_like(ones[0], penalty)
    penalties[-1] = 1e-9
    return torch.linalg.solve(ones.T @ weighed + penalties.diag(), weighed.T @ target)


def minimise(objective: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """The minimum of a smooth function, by L-BFGS."""
    place = start.clone().requires_grad_()
    solver = torch.optim.LBFGS([place], max_iter=60, history_size=8, tolerance_grad=1e-5, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        value = objective(place)
        value.backward()
        return value

    with torch.enable_grad():
        solver.step(closure)
    return place.detach()
