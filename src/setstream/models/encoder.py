"""SetEncoder: phi for each element, a pool for each set.

z = finalize( Σ_chunks absorb( phi(chunk) ) )          the same z for every way of cutting the set into chunks
y = head(z)                                            any set function: the slots are few
"""

import cmath
from contextlib import suppress
from itertools import chain
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from setstream.errors import (
    BatchStatisticsError,
    ConfigurationError,
    DeviceError,
    MismatchError,
    NonFiniteError,
    ShapeError,
    wrong_width,
)
from setstream.models.pretrained import Pretrained
from setstream.pools.base import Context, Pool, cast, named_tensors, parameter_dtype, select_sets
from setstream.sets.layout import Packed, Sets, pack
from setstream.states.compat import read_as
from setstream.states.fingerprint import Origin
from setstream.states.state import State, fits


def all_finite(x: Tensor) -> bool:
    """Whether x holds no NaN and no infinity. One pass and no temporary unless the sum overflows."""
    if not (x.is_floating_point() or x.is_complex()):
        return True
    x = x.detach()
    return cmath.isfinite(x.sum().item()) or bool(torch.isfinite(x).all())


# What is found out about an encoder once: the width of its features, and an example of its states.
_facts: WeakKeyDictionary[Origin, dict[str, Any]] = WeakKeyDictionary()

ONE_SET = (
    "Sets are (B, N, ...): if this was one set (N, width), pass x[None]; if it was one element (width,), pass x[None, None]"
)


class SetEncoder(Pretrained, nn.Module):
    """Encode sets of any size, in any chunks: z = pool({phi(x) : x in set}).

    `phi` is any module that treats elements independently: it gets (M, ...) elements and gives (M, in_dim) features.
    Elements may be vectors, images, token ids. Chunks and sets come in any layout of `setstream.sets.layout`: (B, n, ...) with
    an optional mask, a list of B tensors, or a pair (x, ptr).

    check_finite: refuse NaN and infinity at the door (once per chunk) and at the exit (once per set).
    cast_input:   bring elements to phi's dtype; integers too, unless phi holds an embedding that wants them.

    >>> import torch, setstream as ss
    >>> encoder = ss.SetEncoder(torch.nn.Linear(2, 16), ss.UMBC(16, num_slots=4, out_dim=16, heads=2)).eval()
    >>> x = torch.randn(3, 100, 2)
    >>> state = None
    >>> for chunk in x.split(7, dim=1):
    ...     state = encoder.update(state, chunk)
    >>> z = encoder.finalize(state)                # (B, num_slots, out_dim)
    >>> z.shape, torch.allclose(z, encoder(x), atol=1e-5)
    (torch.Size([3, 4, 16]), True)
    """

    #: Attributes that do not change what is computed; a module of yours may have such a list of its own.
    not_in_fingerprint: ClassVar[tuple[str, ...]] = ("check_finite", "cast_input", "_origin", "_built")

    def __init__(self, phi: nn.Module, pool: Pool, *, check_finite: bool = True, cast_input: bool = True) -> None:
        super().__init__()
        if not isinstance(phi, nn.Module):
            raise ConfigurationError(f"phi must be a torch.nn.Module; got {type(phi).__name__}. Wrap a function in a module.")
        if not isinstance(pool, Pool):
            raise ConfigurationError(
                f"pool must be an ss.Pool (UMBC, DeepSets, ...); got {type(pool).__name__}. A set function that needs all its "
                "input goes behind a pool as the head of a SetModel, or into ss.ChunkMean."
            )
        self.phi = phi
        self.pool = pool
        self.check_finite = check_finite
        self.cast_input = cast_input
        self._origin: Origin | None = None

    # -- the three verbs ----------------------------------------------------------------------------------------------

    def empty(self, batch: int, *, generator: torch.Generator | None = None) -> State:
        """The state of `batch` sets that have no elements yet: the zero of `+`.

        In training mode, pools with random slots draw them here, once for each set and pass. Start every chunk of a pass
        from the same empty state (or from None and go on with what `update` gives), and all chunks share the draw.
        """
        if batch < 1:
            raise ShapeError(f"a state holds at least one set; got batch = {batch}")
        return self._empty(batch, self.device or torch.get_default_device(), generator)

    def update(self, state: State | None, chunk: Sets, mask: Tensor | None = None, *, chunks: str | None = None) -> State:
        """The state after the elements of `chunk` have been added to the sets of `state` (None: to nothing).

        chunks: "average" lets a pool that is not consistent take a set in several chunks; otherwise a ConsistencyError.
        """
        return self._update(state, pack(chunk, mask), chunks)

    def _update(self, state: State | None, packed: Packed, chunks: str | None = None) -> State:
        fresh = state is None
        if state is None:
            state = self._empty(len(packed), self.device or packed.elements.device)
        else:
            self.check_state(state)
            if len(state) != len(packed):
                raise ShapeError(f"the state holds {len(state)} sets, the chunk {len(packed)}: one chunk per set is needed")
            if self.pool.refuse_chunks(chunks) and any(map(min, state.count.tolist(), packed.lengths)):
                raise self.pool.inconsistent()
        features = self.features(packed.elements)
        context = self._context(state)
        absorbed = self.absorb(state, context, packed, features)
        merged = absorbed.widened() if fresh else state + absorbed
        merged.context = None if torch.is_grad_enabled() else context
        return merged

    def merge(self, state: State, other: State, *, chunks: str | None = None) -> State:
        """state + other, both checked to be this encoder's; `chunks` as `update` has it."""
        self.check_state(state)
        self.check_state(other)
        if self.pool.refuse_chunks(chunks) and bool(((state.count > 0) & (other.count > 0)).any()):
            raise self.pool.inconsistent()
        return state + other

    def finalize(self, state: State, *, chunks: str | None = None) -> Any:
        """z of the sets: (B, num_slots, out_dim) from a pool with slots; `chunks` as `update` has it."""
        self.check_state(state)
        if self.pool.refuse_chunks(chunks):
            seen = self.pool.chunks_seen(state)
            if seen is not None and bool((seen > 1).any()):
                raise self.pool.inconsistent()
        return self.finalize_unchecked(state)

    def forward(self, sets: Sets, mask: Tensor | None = None) -> Any:
        """z of whole sets in one call: the same as `finalize(update(None, sets))`, and faster where all have one size."""
        packed = pack(sets, mask)
        if len(set(packed.lengths)) == 1 and packed.lengths[0]:
            features = self.features(packed.elements)
            return self._checked(self.pool(features.unflatten(0, (len(packed), -1))))
        return self.finalize(self._update(None, packed))

    # -- looking inside -----------------------------------------------------------------------------------------------

    def features(self, elements: Tensor) -> Tensor:
        """phi of (M, ...) elements: (M, in_dim), checked."""
        self._check_phi()
        if self.device not in (None, elements.device):
            raise DeviceError(f"the elements are on {elements.device}, the encoder is on {self.device}: move one of them")
        if self.check_finite and not all_finite(elements):
            bad = ~torch.isfinite(elements.detach()).flatten(1).all(1) if elements.dim() > 1 else ~torch.isfinite(elements)
            raise NonFiniteError(
                f"{int(bad.sum())} of {len(elements)} elements hold NaN or infinity (first: element {int(bad.int().argmax())} "
                f"of the real elements of this chunk). Clean or mask them; check_finite=False switches this check off."
            )
        in_dim = self.pool.in_dim
        if not len(elements) and in_dim is not None:
            return torch.empty(0, in_dim, device=elements.device, dtype=self._feature_dtype())
        try:
            features: Tensor = self.phi(self.cast(elements))
        except (RuntimeError, IndexError) as error:
            if wrong := self._wrong_width(elements):
                raise ShapeError(wrong) from error
            error.add_note(f"phi was reading {len(elements)} elements of shape {tuple(elements.shape[1:])}, {elements.dtype}")
            if elements.dim() == 1:
                error.add_note(ONE_SET)
            raise
        if not isinstance(features, Tensor):
            raise ShapeError(f"phi must give a tensor ({len(elements)}, {in_dim or 'D'}); it gave a {type(features).__name__}")
        if features.dim() != 2 or len(features) != len(elements) or in_dim not in (None, features.shape[-1]):
            raise ShapeError(
                (self._wrong_width(elements) if elements.dim() == 1 else None)
                or f"phi must turn elements {tuple(elements.shape)} into features ({len(elements)}, {in_dim or 'D'}), the "
                f"pool's in_dim; it gave {tuple(features.shape)}"
            )
        if self.check_finite and not all_finite(features):
            raise NonFiniteError(
                "phi made NaN or infinity of finite elements: it overflows, or takes a logarithm it should not. Nothing was "
                "added to any state; check_finite=False switches this check off."
            )
        return features if features.is_floating_point() else features.to(self._feature_dtype())

    def attention(self, chunk: Tensor, state: State, mask: Tensor | None = None) -> Any:
        """Each element's weight in each slot of the finished `state`: (B, heads, num_slots, n), zero where masked.

        Over all chunks of a set the weights of a slot sum to one (for activations that normalise over the set), so a heat map
        of a set of any size is drawn chunk by chunk. `chunk` is dense, (B, n, ...).
        """
        if not isinstance(chunk, Tensor) or chunk.dim() < 2 or len(chunk) != len(state):
            came = tuple(chunk.shape) if isinstance(chunk, Tensor) else type(chunk).__name__
            raise ShapeError(
                f"attention takes a dense chunk ({len(state)}, n, ...), one row for each set of the state; got {came}"
            )
        weigh = getattr(self.pool, "attention", None)
        if weigh is None:
            raise MismatchError(f"{type(self.pool).__name__} has no attention to show: use a pool with slots, like UMBC")
        self.check_state(state)
        features = self.features(pack(chunk, mask).elements)
        if mask is not None:
            mask = torch.as_tensor(mask, device=chunk.device)
            features = features.new_zeros(mask.numel(), features.shape[-1]).masked_scatter(mask.reshape(-1, 1), features)
        return weigh(features.unflatten(0, chunk.shape[:2]), state, mask)

    # -- helpers ------------------------------------------------------------------------------------------------------

    def absorb(self, state: State, context: Context, packed: Packed, features: Tensor) -> State:
        """The state of a chunk alone, given its features (M, in_dim) and the pass's context; with the draw of `state`."""
        device = features.device
        order: list[int] = []
        pieces: list[State] = []
        for rows, block, mask in packed.groups(features):
            whole = len(rows) == len(packed)
            parts = self.pool.accumulate(context if whole else select_sets(context, rows), block, mask)
            pieces.append(State(parts, torch.tensor([packed.lengths[row] for row in rows], device=device)))
            order += rows
        idle = [row for row, length in enumerate(packed.lengths) if not length]
        if idle:
            count = torch.zeros(len(idle), dtype=torch.int64, device=device)
            pieces.append(State(self.pool.empty_accumulators(len(idle), device, features.shape[-1]), count))
            order += idle
        chunk = pieces[0] if len(pieces) == 1 else State.cat(pieces)[torch.tensor(order, device=device).argsort()]
        # The draw is shared, not absorbed.
        return State(state.accumulators | chunk.accumulators, chunk.count, state.origin)

    def finalize_unchecked(self, state: State) -> Any:
        """`finalize` for a state that is known to be ours."""
        return self._checked(self.pool.finalize(state))

    def _checked(self, z: Any) -> Any:
        dtype = parameter_dtype(self.pool) or parameter_dtype(self.phi) or torch.get_default_dtype()
        z = cast(z, dtype)
        if self.check_finite:
            for name, tensor in named_tensors(z):
                if not all_finite(tensor):
                    raise NonFiniteError(
                        f"the encoding {name} holds NaN or infinity although the input was finite: phi or the weights "
                        "overflow. Look at encoder.features(x); check_finite=False lets it pass."
                    )
        return z

    def _context(self, state: State) -> Context:
        if state.context is None or torch.is_grad_enabled():
            return self.pool.prepare(state)
        return state.context

    def _current_origin(self) -> Origin:
        if self._origin is None or not self._origin.current():
            self._origin = Origin(self)
        return self._origin

    def check_state(self, state: State) -> None:
        """Raise unless this encoder, with these weights, made the state; one that comes from outside is looked at closely.

        MismatchError: another encoder's, or with parts, shapes or types that this one's states do not have. A fingerprint
        alone proves nothing. (Numbers that no elements give are refused where a state is read: StateFormatError.)
        """
        if not isinstance(state, State):
            raise MismatchError(f"a State is needed here, from encoder.update() or encoder.empty(); got {type(state).__name__}")
        if self.device not in (None, state.device):
            raise DeviceError(f"the state is on {state.device}, the encoder is on {self.device}: use state.to(device)")
        origin = self._current_origin()
        if state.origin is origin:
            return
        if state.origin is None or not state.origin.same_as(origin):
            raise MismatchError(
                f"this state was made by another encoder (fingerprint {state.fingerprint}) than the one that should use it "
                f"({origin.fingerprint}): architecture or weights differ. Load the weights that made it, or encode again."
            )
        if state.origin.loaded:
            self._check_accumulators(state, origin)
        state.origin = origin  # equal: from now on one pointer comparison tells so

    @torch.no_grad()
    def _check_accumulators(self, state: State, origin: Origin) -> None:
        """Parts, shapes and types, before any arithmetic. Once for each state."""
        key = "parts in training" if self.pool.training else "parts"
        if key not in _facts.setdefault(origin, {}):
            _facts[origin][key] = self._example(state.device)
        example: State = _facts[origin][key]
        state.accumulators = read_as(state.accumulators, example.accumulators)
        if state.kinds() != example.kinds():
            hint = " Was it made in training mode, with drawn slots?" * state.has_draw
            raise MismatchError(f"the state has the parts {state.kinds()}, and states of this encoder {example.kinds()}.{hint}")
        tensors, known = state.tensors(), example.tensors()
        if tensors.keys() != known.keys():
            raise MismatchError(f"the state holds {sorted(tensors)}, and states of this encoder {sorted(known)}")
        for name, tensor in tensors.items():
            free = not example.count.any() and 1 in known[name].shape[1:]  # a width that nobody knows yet
            floats = known[name].is_floating_point()
            same_type = tensor.is_floating_point() if floats else tensor.dtype == known[name].dtype
            if len(tensor) != len(state) or not (free or fits(state, tensor, known[name])) or not same_type:
                kind, shape = str(tensor.dtype).removeprefix("torch."), (len(state), *known[name].shape[1:])
                wanted = "float" if floats else str(known[name].dtype).removeprefix("torch.")
                raise MismatchError(f"{name} is {kind} {tuple(tensor.shape)}, and {wanted} {shape} in states of this encoder")

    def _example(self, device: torch.device) -> State:
        """A state of this encoder: of one element, or of none where nobody knows what an element looks like."""
        state = self._empty(1, device, torch.Generator())
        width = self.pool.in_dim or self._feature_width()
        if width is None:
            return state
        features = torch.zeros(1, 1, width, device=device, dtype=self._feature_dtype())
        parts = self.pool.accumulate(self.pool.prepare(state), features, None)
        return state + State(state.accumulators | parts, torch.ones_like(state.count), state.origin)

    def _feature_width(self) -> int | None:
        """How wide phi's features are, where it tells without elements: the width of the states of pools that take any."""
        facts = _facts.setdefault(self._current_origin(), {})
        if "width" not in facts:
            facts["width"], width = None, self.width()
            if width is not None:
                with torch.no_grad(), suppress(Exception):  # phi is anybody's, and may not like to be without elements
                    dtype, device = self._feature_dtype(), self.device
                    facts["width"] = int(self.phi(torch.zeros(0, width, dtype=dtype, device=device)).shape[-1])
        return facts["width"]

    def _check_phi(self) -> None:
        for name, module in self.phi.named_modules():
            if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
                raise BatchStatisticsError(
                    f"phi{'.' + name if name else ''} is a {type(module).__name__} that uses the statistics of its batch: each "
                    "chunking would give another answer. Put it in eval mode (encoder.phi.eval() freezes its statistics), or "
                    "use LayerNorm, GroupNorm or InstanceNorm, which look at one element only."
                )

    def _wrong_width(self, elements: Tensor) -> str | None:
        """Why phi could not read these: most likely its first layer takes elements of another width."""
        width = self.width()
        if width is not None and elements.dim() == 1:
            return f"{wrong_width('phi', width, 'the elements that came', ())}: they are single numbers. {ONE_SET}"
        if width is not None and elements.shape[-1] != width:
            return wrong_width("phi", width, f"the {len(elements)} elements that came", tuple(elements.shape[1:]))
        return None

    def cast(self, elements: Tensor) -> Tensor:
        """Elements in the type that phi takes."""
        dtype = parameter_dtype(self.phi)
        if not self.cast_input or dtype is None or elements.dtype == dtype or elements.is_complex():
            return elements
        if not elements.is_floating_point() and any(
            isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in self.phi.modules()
        ):
            return elements if elements.dtype in (torch.int32, torch.int64) else elements.long()
        return elements.to(dtype)

    def _feature_dtype(self) -> torch.dtype:
        return parameter_dtype(self.phi) or torch.get_default_dtype()

    def width(self) -> int | None:
        """How many numbers an element has, where phi begins with a linear layer or norm; None where it does not tell."""
        first = next((layer for layer in self.phi.modules() if not isinstance(layer, nn.Sequential | nn.Identity)), None)
        if isinstance(first, nn.LayerNorm | nn.RMSNorm) and len(first.normalized_shape) == 1:
            return int(first.normalized_shape[0])
        found = getattr(first, "in_features", None)  # as linear layers have it, and Standardise
        return found if isinstance(found, int) else None

    @property
    def device(self) -> torch.device | None:
        """Where the weights are; None when there are none, and any place will do."""
        tensor = next(chain(self.parameters(), self.buffers()), None)
        return None if tensor is None else tensor.device

    def _empty(self, batch: int, device: torch.device, generator: torch.Generator | None = None) -> State:
        width = self._feature_width() if self.pool.in_dim is None else None
        state = self.pool.empty(batch, device, generator, width)
        state.origin = self._current_origin()
        return state

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_origin": None}  # belongs to these weights in this process
