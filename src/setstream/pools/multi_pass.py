"""Several passes over a set: the slots of one pass give the queries of the next::

    z_1 = pool_1(Φ; S)                       S the slots of the first pool
    S_i = between_i(z_i)                     i = 1 ... T - 1
    z_i = pool_i(Φ; S_{i-1}),   z = z_T      or z = between_T(z_T), where there are as many as pools

Slots of the later passes depend on the whole set, which a single pass cannot offer. Each pass is a sum over the elements given
its queries, and these depend on the set as a whole: every partition and every order gives the same answer, as long as the set
can be read T times. The state of a later pass holds its queries, like a random draw: states of different queries do not merge.

`SlotAttention` is this with one pool and one update for all passes. Locatello et al., "Object-Centric Learning with Slot
Attention", NeurIPS 2020.
"""

from collections.abc import Iterable, Sequence
from typing import Any
from typing import cast as typed

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError, ConsistencyError, MismatchError
from setstream.pools.base import Context, Cotangents, Pool, Want, cast, given_slots, parameter_dtype
from setstream.pools.projected import Projected
from setstream.pools.umbc import UMBC
from setstream.states.accumulators import Accumulator, Shared
from setstream.states.state import GIVEN, State


class MultiPass(Pool):
    """A pool that reads its set once for each of its pools: features (B, N, in_dim) to the result of the last one.

    Args:
        pools: The pool of each pass. All but the first take their slots from outside (`Pool.takes_slots`): UMBC does, best
            with slots="given", which has no slots of its own.
        between: The module after each pass but the last, or after each pass: from the result of a pool to the slots
            (B, num_slots, slot_dim) of the next. One with `takes_slots = True` is called with the slots of its pass, too.
        shared: The same pool and the same module in all `passes`; give one of each.
        passes: How many passes there are, if they are shared.
        residual: Add the slots of the pass to what the module makes of its result.
        norm: Layer norm on the new slots.

    Example:
        >>> import torch, setstream as ss
        >>> first = ss.UMBC(16, num_slots=4)
        >>> second = ss.UMBC(16, num_slots=4, activation="slot-softmax", slots="given")
        >>> encoder = ss.SetEncoder(torch.nn.Linear(2, 16), ss.MultiPass([first, second], between=[ss.nn.SAB(16)])).eval()
        >>> x = torch.randn(3, 100, 2)
        >>> state = None
        >>> for _ in range(encoder.passes):
        ...     for chunk in x.split(7, dim=1):
        ...         state = encoder.update(state, chunk)
        ...     state = encoder.next_pass(state)
        >>> torch.allclose(encoder.finalize(state), encoder(x), atol=1e-5)
        True
    """

    def __init__(
        self,
        pools: Pool | Sequence[Pool],
        between: nn.Module | Sequence[nn.Module],
        *,
        shared: bool = False,
        passes: int | None = None,
        residual: bool = False,
        norm: bool = False,
    ) -> None:
        super().__init__()
        listed = [pools] if isinstance(pools, Pool) else [*pools]
        modules = [between] if isinstance(between, nn.Module) and not isinstance(between, nn.ModuleList) else [*between]
        if shared and (len(listed) != 1 or len(modules) != 1 or passes is None or passes < 1):
            raise ConfigurationError(
                f"shared passes have one pool, one module between them and a number of passes; got {len(listed)} pools, "
                f"{len(modules)} modules and passes = {passes}"
            )
        if not shared and (
            not listed or passes not in (None, len(listed)) or len(modules) not in (len(listed) - 1, len(listed))
        ):
            raise ConfigurationError(
                f"MultiPass needs a pool for each pass, and a module after each but the last, or after each; got {len(listed)} "
                f"pools, {len(modules)} modules and passes = {passes}"
            )
        for number, pool in enumerate(listed):
            if not isinstance(pool, Pool) or isinstance(pool, MultiPass):
                raise ConfigurationError(f"MultiPass takes pools of one pass each; got {type(pool).__name__}")
            if (shared or number) and not pool.takes_slots:
                raise ConfigurationError(
                    f"{type(pool).__name__} has no slots that could be given to it, so it can only be the first pass: use "
                    "UMBC, or set takes_slots and read ss.given_slots(state) in its prepare()"
                )
        widths = {pool.in_dim for pool in listed} - {None}
        if len(widths) > 1:
            raise ConfigurationError(f"all passes read the same features, so in_dim must agree; got {sorted(map(str, widths))}")
        self.in_dim = next(iter(widths), None)
        self.pools, self.between = nn.ModuleList(listed), nn.ModuleList(modules)
        self.shared, self.residual = shared, residual
        self.passes = passes or len(listed)
        self.consistent = all(pool.consistent for pool in listed)
        new = [getattr(self.pool(number + 1), "slot_dim", None) for number in range(1, self.passes)]
        if norm and None in new:
            raise ConfigurationError("norm needs pools with a slot_dim, such as UMBC")
        self.norms = nn.ModuleList(nn.LayerNorm(width) if width and norm else nn.Identity() for width in new)

    # -- which pass ---------------------------------------------------------------------------------------------------

    def pool(self, number: int) -> Pool:
        """The pool of a pass; the first is 1."""
        return typed(Pool, self.pools[0 if self.shared else number - 1])

    def number(self, names: Iterable[str]) -> int:
        """The pass that accumulators or a context belong to, by their names; the first, if there are none yet."""
        name = next(iter(names), "pass1/")
        number = name.partition("/")[0].removeprefix("pass")
        if not number.isdecimal() or not 1 <= int(number) <= self.passes:
            raise MismatchError(f"a state of this encoder is of pass 1 to {self.passes}; this one has {name!r}")
        return int(number)

    def pass_of(self, state: State) -> int:
        return self.number(state.accumulators)

    def next_pass(self, state: State) -> dict[str, Accumulator]:
        number = self.pass_of(state)
        slots = self._after(number, state)
        batch, device, following = len(state), state.device, self.pool(number + 1)
        accumulators = following.empty_accumulators(batch, device) | {GIVEN: Shared(slots=slots)}
        return self._named(number + 1, accumulators)

    def _after(self, number: int, state: State) -> Any:
        """What the module after a pass makes of its result."""
        pool, part = self.pool(number), state.select(f"pass{number}")
        z = cast(pool.finalize(part), parameter_dtype(pool) or parameter_dtype(self) or torch.get_default_dtype())
        module = self.between[0 if self.shared else number - 1]
        before = given_slots(part)
        if before is None and (self.residual or getattr(module, "takes_slots", False)):
            before = pool.own_slots(part)
        new = module(z, before) if getattr(module, "takes_slots", False) else module(z)
        new = before + new if self.residual else new
        return self.norms[number - 1](new) if number < self.passes else new

    # -- a pool -------------------------------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        return max(self.pool(number).width for number in range(1, self.passes + 1))

    @property
    def sums_only(self) -> bool:
        return all(self.pool(number).sums_only for number in range(1, self.passes + 1))

    @property
    def cuts_blocks(self) -> bool:
        return all(self.pool(number).cuts_blocks for number in range(1, self.passes + 1))

    @property
    def has_pull_back(self) -> bool:
        return all(self.pool(number).has_pull_back for number in range(1, self.passes + 1))

    def configuration(self) -> dict[str, Any]:
        return {"passes": self.passes, "residual": self.residual}

    def empty_accumulators(self, batch: int, device: torch.device, width: int | None = None) -> dict[str, Accumulator]:
        return self._named(1, self.pool(1).empty_accumulators(batch, device, width))

    def empty_like(self, state: State, batch: int, width: int | None) -> dict[str, Accumulator]:
        number = self.pass_of(state)
        return self._named(number, self.pool(number).empty_accumulators(batch, state.device, width))

    def draw_accumulators(self, batch: int, device: torch.device, generator: torch.Generator | None) -> dict[str, Accumulator]:
        return self._named(1, self.pool(1).draw_accumulators(batch, device, generator))

    def prepare(self, state: State) -> Context:
        number = self.pass_of(state)
        context = self.pool(number).prepare(state.select(f"pass{number}"))
        mark = torch.zeros(1, device=state.device)  # a context may be empty
        return self._named(number, context | {"": mark})

    def accumulate(self, context: Context, features: Tensor, mask: Tensor | None) -> dict[str, Accumulator]:
        number, own = self._own(context)
        return self._named(number, self.pool(number).accumulate(own, features, mask))

    def pull_back(
        self, context: Context, features: Tensor, mask: Tensor | None, whole: Cotangents, want: Want
    ) -> tuple[Tensor | None, Context]:
        number, own = self._own(context)
        start = f"pass{number}/"
        cotangents = {(name.removeprefix(start), key): tensor for (name, key), tensor in whole.items()}
        rows, bars = self.pool(number).pull_back(own, features, mask, cotangents, want)
        return rows, self._named(number, bars)

    def finalize(self, state: State) -> Any:
        number = self.pass_of(state)
        if number < self.passes:
            raise ConsistencyError(
                f"this state is of pass {number} of {self.passes}: the set has to be read again before it has an encoding. Go "
                "on with next_pass() and the same elements (encoder(x) and ss.encode do it by themselves)"
            )
        if len(self.between) < self.passes and not self.shared:
            return self.pool(number).finalize(state.select(f"pass{number}"))
        return self._after(number, state)

    def attention(self, features: Tensor, state: State, mask: Tensor | None = None) -> Any:
        """The weights of the pass that the state belongs to."""
        number = self.pass_of(state)
        weigh = getattr(self.pool(number), "attention", None)
        if weigh is None:
            raise ConfigurationError(f"the pool of pass {number} has no attention")
        return weigh(features, state.select(f"pass{number}"), mask)

    def chunks_seen(self, state: State) -> Tensor | None:
        number = self.pass_of(state)
        return self.pool(number).chunks_seen(state.select(f"pass{number}"))

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Any:
        state = self.absorb_whole(features, mask)
        for _ in range(1, self.passes):
            state = self.absorb_whole(features, mask, State(self.next_pass(state), torch.zeros_like(state.count)))
        return cast(self.finalize(state), parameter_dtype(self) or features.dtype)

    def _own(self, context: Context) -> tuple[int, Context]:
        number = self.number(context)
        start = f"pass{number}/"
        return number, {name.removeprefix(start): tensor for name, tensor in context.items() if name != start}

    @staticmethod
    def _named(number: int, values: dict[str, Any]) -> dict[str, Any]:
        return {f"pass{number}/{name}": value for name, value in values.items()}


class SlotUpdate(nn.Module):
    """The update of Slot Attention: s ← GRU(z, s), then s ← s + MLP(LN(s))."""

    takes_slots = True

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gru = nn.GRUCell(dim, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))

    def forward(self, z: Tensor, slots: Tensor) -> Tensor:
        """The new slots (B, K, dim), from what the slots have gathered and from the slots themselves."""
        updated = self.gru(z.flatten(0, 1), slots.expand_as(z).flatten(0, 1)).view_as(z)
        return updated + self.mlp(updated)


class SlotAttention(MultiPass):
    """Slot Attention as a pool: (B, N, in_dim) to (B, num_slots, slot_dim), in `passes` passes over the set.

    The weights of an element are normalised over the slots, each slot takes the weighted mean of its elements, and a GRU and an
    MLP update it (Locatello et al., NeurIPS 2020). Unlike there, sets may be read in chunks of any size.

    >>> import torch, setstream as ss
    >>> ss.SlotAttention(16, num_slots=5, passes=3)(torch.randn(2, 100, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        in_dim: int,
        num_slots: int,
        slot_dim: int | None = None,
        *,
        passes: int = 3,
        hidden: int = 128,
        slots: str = "shared-gaussian",
        eval_slots: str = "fixed",
    ) -> None:
        width = in_dim if slot_dim is None else slot_dim
        pool = UMBC(in_dim, num_slots, width, width, activation="slot-softmax", slots=slots, eval_slots=eval_slots, bias=False)
        super().__init__(Projected(nn.LayerNorm(in_dim), pool, in_dim), SlotUpdate(width, hidden), shared=True, passes=passes)
