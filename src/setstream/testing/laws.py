"""The laws of values: consistency, permutation, merging, slots; each check compares an eval-mode copy with a float64 twin."""

import copy
from collections.abc import Iterator
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from setstream.errors import LawViolation, MismatchError
from setstream.models.encoder import SetEncoder
from setstream.models.model import SetModel
from setstream.pools.base import AVERAGE, named_tensors
from setstream.sets.layout import Sets, pack
from setstream.states.state import State

FACTOR = 2.0
SLACK = 8.0  # units in the last place of the largest value that are always allowed
SLACK_DOUBLE = 256.0  # a float64 model has no wider reference: it is compared with its own one-shot result
GROSSLY_WRONG = 0.1  # a larger error of the one-shot result is not rounding
Model = SetEncoder | SetModel
Mask = Tensor | None


def allowed_error(one_shot: float, dtype: torch.dtype, slack: float = SLACK) -> float:
    """The largest error, given that of the one-shot result."""
    return FACTOR * one_shot + (SLACK_DOUBLE if dtype == torch.float64 else slack) * torch.finfo(dtype).eps


def in_float64(sets: list[Tensor]) -> list[Tensor]:
    """The sets with floating-point elements widened; token ids stay."""
    return [x.double() if x.is_floating_point() else x for x in sets]


class Subject:
    """An eval-mode copy of a model, its float64 twin, the sets as a list, and random numbers."""

    def __init__(self, model: Model, sets: Sets, mask: Tensor | None, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        packed = pack(sets, mask)
        self.sets = list(packed.elements.detach().split(packed.lengths))
        self.model = copy.deepcopy(model).eval()
        reference = copy.deepcopy(model).double().eval()
        self.encoder = self.model.encoder if isinstance(self.model, SetModel) else self.model
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # for encoders without parameters
        try:
            self.reference = dict(named_tensors(reference(in_float64(self.sets))))
        finally:
            torch.set_default_dtype(default)
        self.one_shot = self.errors(self.model(self.sets))
        for name, error in self.one_shot.items():
            if not error < GROSSLY_WRONG:
                raise LawViolation(f"in one piece {name} is off by {error:.3g} against float64: too far to compare with it")

    def streamed(self, chunks: list[list[Tensor]]) -> Any:
        """The result of the chunks one after another."""
        state = self.encoder.empty(len(self.sets))
        for number in range(self.encoder.passes):
            begun = self.encoder.next_pass(state) if number else state
            state = reduce(partial(self.encoder.update, chunks=AVERAGE), chunks, begun)
        return self.model.finalize(state, chunks=AVERAGE)

    def finished(self, state: State) -> Any:
        """The result of a state, after the passes that it has not had."""
        for _ in range(self.encoder.pool.pass_of(state), self.encoder.passes):
            state = self.encoder.update(self.encoder.next_pass(state), self.sets)
        return self.model.finalize(state, chunks=AVERAGE)

    def errors(self, z: Any) -> dict[str, float]:
        """Largest distance of each tensor of z from the reference, relative to the largest value of the set."""
        errors = {}
        for name, tensor in named_tensors(z):
            expected = self.reference[name]
            if tensor.shape != expected.shape:
                raise LawViolation(f"{name} has shape {tuple(tensor.shape)} here and {tuple(expected.shape)} for the whole set")
            errors[name] = 0.0
            if expected.numel():
                sizes = expected.flatten(1).abs().amax(1)  # of each set, so that a large one does not hide the others
                worst = (tensor.double() - expected).flatten(1).abs().amax(1)
                scale = sizes.clamp(min=1e-3 * float(sizes.max()))
                errors[name] = float((worst / torch.where(scale > 0, scale, 1.0)).max())
        return errors

    def judge(self, law: str, case: str, z: Any) -> float:
        """Raise LawViolation unless every tensor of z is close enough to the reference."""
        dtypes, errors = {name: tensor.dtype for name, tensor in named_tensors(z)}, self.errors(z)
        for name, error in errors.items():
            allowed = allowed_error(self.one_shot[name], dtypes[name])
            if not error <= allowed:
                raise LawViolation(
                    f"{law} is broken: with {case}, {name} is off by {error:.3g} (relative to its largest value, against "
                    f"float64); in one piece it is off by {self.one_shot[name]:.3g}, so {allowed:.3g} is allowed"
                )
        return max(errors.values(), default=0.0)


def random_partition(sets: list[Tensor], chunks: int, generator: torch.Generator) -> list[list[Tensor]]:
    """Each set's elements distributed at random over `chunks` chunks, some of which may get none.

    >>> chunks = random_partition([torch.arange(5), torch.arange(2)], 3, torch.Generator().manual_seed(0))
    >>> len(chunks), sum(len(chunk[0]) for chunk in chunks), sum(len(chunk[1]) for chunk in chunks)
    (3, 5, 2)
    """
    dealt = []
    for x in sets:
        order = torch.randperm(len(x), generator=generator).to(x.device)
        cuts = torch.randint(0, len(x) + 1, (chunks - 1,), generator=generator).sort().values
        dealt.append([x[part] for part in order.tensor_split(cuts)])
    return [list(chunk) for chunk in zip(*dealt, strict=True)]


def _partitions(sets: list[Tensor], trials: int, generator: torch.Generator) -> Iterator[tuple[str, list[list[Tensor]]]]:
    longest = max(len(x) for x in sets)
    for size in {1 if longest <= 64 else -(-longest // 64), -(-longest // 3) or 1}:
        count = max(-(-longest // size), 1)
        yield f"chunks of {size} in order", [[x[i * size : (i + 1) * size] for x in sets] for i in range(count)]
    for _ in range(trials):
        count = int(torch.randint(2, max(3, min(longest, 12) + 1), (), generator=generator))
        yield f"a random partition into {count} chunks", random_partition(sets, count, generator)


@torch.no_grad()
def check_mini_batch_consistency(model: Model, sets: Sets, mask: Mask = None, *, trials: int = 5, seed: int = 0) -> float:
    """Every partition of the sets gives the answer of the whole: in chunks of equal size, and `trials` random ones.

    >>> x = torch.randn(2, 50, 8)
    >>> error = ss.testing.check_mini_batch_consistency(ss.SetEncoder(torch.nn.Identity(), ss.UMBC(8, num_slots=4)), x)
    >>> error < 1e-5
    True
    >>> chunked = ss.SetEncoder(torch.nn.Identity(), ss.ChunkMean(ss.nn.SetTransformer(8)))
    >>> ss.testing.check_mini_batch_consistency(chunked, x)
    Traceback (most recent call last):
    ...
    setstream.errors.LawViolation: mini-batch consistency is broken: with chunks of ...
    """
    subject = Subject(model, sets, mask, seed)
    cases = _partitions(subject.sets, trials, subject.generator)
    return max(subject.judge("mini-batch consistency", case, subject.streamed(chunks)) for case, chunks in cases)


@torch.no_grad()
def check_permutation_invariance(model: Model, sets: Sets, mask: Mask = None, *, trials: int = 5, seed: int = 0) -> float:
    """The order of the elements does not matter.

    >>> encoder = ss.SetEncoder(torch.nn.Identity(), ss.SSE(8, num_slots=4))
    >>> ss.testing.check_permutation_invariance(encoder, [torch.randn(9, 8), torch.randn(3, 8)]) < 1e-5
    True
    """
    subject = Subject(model, sets, mask, seed)
    errors = [0.0]
    for trial in range(trials):
        shuffled = [x[torch.randperm(len(x), generator=subject.generator).to(x.device)] for x in subject.sets]
        errors.append(subject.judge("permutation invariance", f"random order {trial}", subject.model(shuffled)))
    return max(errors)


@torch.no_grad()
def check_merge(model: Model, sets: Sets, mask: Tensor | None = None, *, trials: int = 3, seed: int = 0) -> float:
    """States add up to the whole's answer, in each pass: commutative, associative, with a zero, also through bytes.

    >>> encoder = ss.SetEncoder(torch.nn.Identity(), ss.DeepSets("max"))
    >>> ss.testing.check_merge(encoder, torch.randn(2, 30, 8))
    0.0
    """
    subject = Subject(model, sets, mask, seed)
    encoder, expected = subject.encoder, [len(x) for x in subject.sets]
    errors = []
    begun: State | None = None
    for trial in range(trials * encoder.passes):
        if trial and trial % trials == 0:
            begun = encoder.next_pass(encoder.update(begun, subject.sets))
        a, b, c = (encoder.update(begun, chunk) for chunk in random_partition(subject.sets, 3, subject.generator))
        zero = encoder.empty(len(subject.sets)) if begun is None else begun
        cases = {
            "(a + b) + c": (a + b) + c,
            "a + (b + c)": a + (b + c),
            "c + b + a": c + b + a,
            "0 + a + b + c + 0": zero + a + b + c + zero,
            "b through bytes": a + State.from_bytes(b.to_bytes()).to(a.device) + c,
        }
        for case, state in cases.items():
            if state.count.tolist() != expected:
                raise LawViolation(f"merge is broken: with {case}, count is {state.count.tolist()}, expected {expected}")
            errors.append(subject.judge("merge", case, subject.finished(state)))
    return max(errors)


@torch.no_grad()
def check_slot_equivariance(model: SetEncoder, sets: Sets, mask: Mask = None, *, trials: int = 3, seed: int = 0) -> float:
    """Reordering the slots reorders the rows of z and does nothing else. For pools that have `permute_slots_`.

    >>> encoder = ss.SetEncoder(torch.nn.Identity(), ss.UMBC(8, num_slots=4, slot_residual=True))
    >>> ss.testing.check_slot_equivariance(encoder, torch.randn(2, 30, 8)) < 1e-5
    True
    """
    if not hasattr(model.pool, "permute_slots_"):
        raise MismatchError(f"{type(model.pool).__name__} has no slots to permute (no method permute_slots_)")
    subject = Subject(model, sets, mask, seed)
    errors = []
    z = subject.reference["z"]
    slots = z.shape[1] if z.dim() == 3 else int(getattr(model.pool, "num_slots", 1))
    for trial in range(trials):
        other = copy.deepcopy(subject.encoder)
        order = torch.randperm(slots, generator=subject.generator).to(z.device)
        getattr(other.pool, "permute_slots_")(order)  # noqa: B009 - not every pool has it
        permuted = other(subject.sets)[:, order.argsort()] if z.dim() == 3 else other(subject.sets)
        errors.append(subject.judge("slot equivariance", f"random slot order {trial}", permuted))
    return max(errors)
