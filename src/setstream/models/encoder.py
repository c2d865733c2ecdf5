"""SetEncoder: phi for each element, a pool for each set.

z = finalize( Σ_chunks absorb( phi(chunk) ) )          the same z for every way of cutting the set into chunks
y = head(z)                                            any set function: the slots are few
"""

from contextlib import suppress
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from setstream.errors import ConfigurationError, DeviceError, MismatchError, NonFiniteError, ShapeError
from setstream.models.phi import Reader, all_finite, cast_elements, check_accumulators, element_width, non_finite
from setstream.models.pretrained import Pretrained
from setstream.pools.base import Context, Pool, cast, named_tensors, parameter_dtype, select_sets
from setstream.pools.kernels.cheap_layers import CheapLayers
from setstream.sets.layout import Packed, Sets, Tile, pack, tiles
from setstream.states.accumulators.pieces import Pieces
from setstream.states.fingerprint import Origin
from setstream.states.state import State


class SetEncoder(Pretrained, nn.Module):
    """Encode sets of any size, in any chunks: z = pool({phi(x) : x in set}).

    Elements may be vectors, images or token ids. Chunks and sets may have any layout of `setstream.sets.layout`: (B, n, ...)
    with an optional mask, a list of B tensors, or a pair (x, ptr).

    Args:
        phi: Any module that treats elements independently, from (M, ...) elements to (M, in_dim) features.
        pool: Turns a set of features into one encoding.
        check_finite: Raise NonFiniteError if a chunk or an encoding contains NaN or infinity.
        cast_input: Convert elements to phi's dtype; not integers if phi holds an embedding.

    Example:
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

    #: Attributes that do not change what is computed; your own modules may have such a list, too.
    not_in_fingerprint: ClassVar[tuple[str, ...]] = ("check_finite", "cast_input", "_origin", "_built")

    def __init__(self, phi: nn.Module, pool: Pool, *, check_finite: bool = True, cast_input: bool = True) -> None:
        super().__init__()
        if not isinstance(phi, nn.Module):
            raise ConfigurationError(f"phi must be a torch.nn.Module; got {type(phi).__name__}. Wrap a function in a module.")
        if not isinstance(pool, Pool):
            raise ConfigurationError(
                f"pool must be an ss.Pool (UMBC, DeepSets, ...); got {type(pool).__name__}. A set function that needs all its "
                "input can be the head of a SetModel, after a pool, or go into ss.ChunkMean."
            )
        self.phi = phi
        self.pool = pool
        self.check_finite = check_finite
        self.cast_input = cast_input
        self._origin: Origin | None = None

    def empty(self, batch: int, *, generator: torch.Generator | None = None) -> State:
        """The state of `batch` sets that have no elements yet: the zero of `+`.

        In training mode, pools with random slots draw them here, once for each set and pass. Start every chunk of a pass
        from the same empty state (or from None, and go on with what `update` returns): all chunks then share the draw.
        """
        if batch < 1:
            raise ShapeError(f"a state holds at least one set; got batch = {batch}")
        return self._empty(batch, self.device or torch.get_default_device(), generator)

    def update(self, state: State | None, chunk: Sets, mask: Tensor | None = None, *, chunks: str | None = None) -> State:
        """The state after the elements of `chunk` have been added to its sets.

        Args:
            state: A state of this encoder with as many sets as the chunk; None begins a new one.
            chunk: Elements in any layout.
            mask: (B, n), True for real elements.
            chunks: "average" lets a pool that is not consistent read a set in several chunks.

        Raises:
            ConsistencyError: If a set is given in several chunks and the pool is not consistent.
        """
        return self._update(state, pack(chunk, mask), chunks)

    def _update(self, state: State | None, packed: Packed, chunks: str | None = None) -> State:
        if state is None:
            return self._whole(packed).widened()
        self.check_state(state)
        if len(state) != len(packed):
            raise ShapeError(f"the state holds {len(state)} sets, the chunk {len(packed)}: one chunk per set is needed")
        if self.pool.refuse_chunks(chunks) and any(map(min, state.count.tolist(), packed.lengths)):
            raise self.pool.inconsistent()
        return state + self.absorb(state, self._context(state), packed)

    def _whole(self, packed: Packed, features: Tensor | None = None) -> State:
        """The state of sets that had no elements before."""
        device, batch = self.device or packed.elements.device, len(packed)
        draw = self.pool.draw_accumulators(batch, device, None)
        begun = State(draw, torch.zeros(batch, dtype=torch.int64, device=device), self.origin)
        return self.absorb(begun, self._context(begun), packed, features)

    def _context(self, state: State) -> Context:
        """What the pool computes for a pass; in eval mode, without a draw and a graph, once for these weights and batches."""
        if torch.is_grad_enabled():  # the slots need a gradient
            return self.pool.prepare(state)
        if state.context is not None:
            return state.context
        if self.pool.training or state.has_draw or state.origin is None:
            return self.pool.prepare(state)
        known = state.origin.known
        batch, context = known.get("context", (0, {}))
        if batch != len(state):  # a pool may have a row for each set
            context = self.pool.prepare(state)
            known["context"] = (len(state), context)
        return context

    def merge(self, state: State, other: State, *, chunks: str | None = None) -> State:
        """`state + other`, both checked to be of this encoder; `chunks` as in `update`."""
        self.check_state(state)
        self.check_state(other)
        if self.pool.refuse_chunks(chunks) and bool(((state.count > 0) & (other.count > 0)).any()):
            raise self.pool.inconsistent()
        return state + other

    @property
    def passes(self) -> int:
        """How often a set is read: more than once with `ss.MultiPass`."""
        return self.pool.passes

    def check_one_pass(self, what: str) -> None:
        """Raise ConfigurationError if sets have to be read more than once, which `what` cannot do."""
        if self.passes > 1:
            raise ConfigurationError(
                f"this encoder reads its sets {self.passes} times (ss.MultiPass), which is not possible for {what}: use a pool "
                "with one pass, or encoder(x), ss.encode or a stream with next_pass() where the elements can be read again"
            )

    def next_pass(self, state: State) -> State:
        """The state with which the next pass over the same sets begins; after the last pass, the state itself."""
        self.check_state(state)
        if self.pool.pass_of(state) == self.passes:
            return state
        return self.next_unchecked(state)

    def next_unchecked(self, state: State) -> State:
        """`next_pass` for a state that is known to be of this encoder."""
        return State(self.pool.next_pass(state), torch.zeros_like(state.count), state.origin)

    def finalize(self, state: State, *, chunks: str | None = None) -> Any:
        """The encoding z of the sets: (B, num_slots, out_dim) from a pool with slots; `chunks` as in `update`."""
        self.check_state(state)
        if self.pool.refuse_chunks(chunks):
            seen = self.pool.chunks_seen(state)
            if seen is not None and bool((seen > 1).any()):
                raise self.pool.inconsistent()
        return self.finalize_unchecked(state)

    def forward(self, sets: Sets, mask: Tensor | None = None) -> Any:
        """The encoding z of whole sets: the same as `finalize(update(None, sets))`, and faster if all have one size."""
        packed = pack(sets, mask)
        features = self.features(packed.elements) if torch.is_grad_enabled() else None
        if features is not None and len(set(packed.lengths)) == 1 and packed.lengths[0]:
            return self._checked(self.pool(features.unflatten(0, (len(packed), -1))))
        state = self._whole(packed, features)
        for _ in range(1, self.passes):
            begun = self.next_unchecked(state)
            state = self.absorb(begun, self.pool.prepare(begun), packed, features)
        return self.finalize_unchecked(state)

    def features(self, elements: Tensor, *, known: bool = False, reader: Reader | None = None) -> Tensor:
        """The features (M, in_dim) that phi makes of (M, ...) elements, checked. known: both are known to be finite."""
        reader = reader or self.reader()
        reader.check(elements)
        look = self.check_finite and not known
        if look and not all_finite(filled := reader.filled(elements)):
            raise non_finite(filled)
        features = reader.read(elements, self.phi, self.cast_input)
        if look and not all_finite(features):
            raise NonFiniteError(
                "phi returned NaN or infinity for finite elements, perhaps by an overflow or a logarithm. Nothing was "
                "added to any state; check_finite=False switches this check off."
            )
        return features

    def reader(self) -> Reader:
        """What phi's modules determine, for all chunks of a pass."""
        return Reader(self.phi, self.pool, self.device)

    def _reader(self, origin: Origin) -> Reader:
        """The same, as long as the encoder has this origin."""
        if "reader" not in origin.known:
            origin.known["reader"] = self.reader()
        return origin.known["reader"]

    def attention(self, chunk: Tensor, state: State, mask: Tensor | None = None) -> Any:
        """The weight of each element in each slot of a finished state: (B, heads, num_slots, n), zero where masked.

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

    def absorb(
        self,
        state: State,
        context: Context,
        packed: Packed,
        features: Tensor | None = None,
        reader: Reader | None = None,
    ) -> State:
        """The state of a chunk alone, with the draw of `state`.

        Args:
            state: The state whose sets the chunk belongs to.
            context: The context of the pass.
            packed: The elements.
            features: What phi makes of them, if that is known. Otherwise phi is computed: a chain of cheap layers together with
                the pool, tile by tile.
            reader: What is known of phi; None: found out.
        """
        pieces, device = Pieces(len(state)), packed.elements.device
        if features is not None or torch.is_grad_enabled() or not self.pool.consistent:
            features = self.features(packed.elements, reader=reader) if features is None else features
            self._absorb_tile(pieces, context, Tile(0, packed.first, packed.lengths), features)
        else:
            if reader is None:
                reader = self.reader() if state.origin is None else self._reader(state.origin)
            self._absorb_tiles(pieces, context, packed, reader)
        if idle := pieces.missing():
            width = self._feature_width() if features is None else features.shape[-1]
            pieces.add(idle, self.pool.empty_like(state, len(idle), width))
        before, after = packed.first, len(state) - packed.first - len(packed)
        count = torch.tensor([0] * before + packed.lengths + [0] * after, device=device)
        kept = None if torch.is_grad_enabled() else context
        return State(state.accumulators | pieces.merged(), count, state.origin, kept)  # the draw is shared, not absorbed

    def _absorb_tile(self, pieces: Pieces, context: Context, tile: Tile, features: Tensor) -> None:
        for group in tile.groups(features):
            whole = len(group.sets) == pieces.batch
            some = context if whole else select_sets(context, group.sets)
            pieces.add(group.sets, self.pool.accumulate(some, group.features, group.mask))

    def _absorb_tiles(self, pieces: Pieces, context: Context, packed: Packed, reader: Reader) -> None:
        """phi and the pool on each tile. Where the sums show NaN and infinity, they are looked for once, at the end."""
        reader.check(packed.elements)
        late = self.check_finite and self.pool.sums_only
        layers, elements = reader.layers, packed.elements
        phi: CheapLayers | nn.Module = self.phi
        if layers is not None and self.pool.sums_only and not torch.is_autocast_enabled(elements.device.type):
            phi = CheapLayers(layers)
        tested = late and layers != [] and (elements.is_floating_point() or elements.is_complex())  # []: the identity
        sums: list[Tensor] = []
        even = min(packed.lengths) == max(packed.lengths) > 0
        wide = elements.is_floating_point() and elements.dtype.itemsize >= 4  # narrow numbers are widened tile by tile
        if layers == [] and even and wide and self.pool.cuts_blocks:  # nothing is computed from an element before the pool
            cut = [Tile(0, packed.first, packed.lengths)]
        else:
            cut = tiles(packed.lengths, reader.block_size(elements), packed.first)
        for tile in cut:
            some = elements if len(cut) == 1 else elements[tile.start : tile.stop]
            look = self.check_finite and not late
            features = self.features(some, reader=reader) if look else reader.read(some, phi, self.cast_input)
            self._absorb_tile(pieces, context, tile, features)
            if tested:
                sums.append(reader.filled(some).sum(dtype=torch.promote_types(some.dtype, torch.float32)))  # half overflows
        if late and not pieces.finite(sums):
            self.features(elements, reader=reader)  # raises the error

    def finalize_unchecked(self, state: State) -> Any:
        """`finalize` for a state that is known to be of this encoder."""
        return self._checked(self.pool.finalize(state))

    def _checked(self, z: Any) -> Any:
        z = cast(z, parameter_dtype(self.pool) or self._feature_dtype())
        for name, tensor in named_tensors(z) if self.check_finite else ():
            if not all_finite(tensor):
                raise NonFiniteError(
                    f"the encoding {name} holds NaN or infinity although the input was finite: phi or the weights "
                    "overflow. Look at encoder.features(x); check_finite=False lets it pass."
                )
        return z

    def check_state(self, state: State) -> None:
        """Raise an error unless this encoder, with these weights, made the state.

        A state from outside may have been edited, so a matching fingerprint alone is not enough: its accumulators, shapes and
        types are compared, too. (Impossible values raise StateFormatError when a state is read.)

        Raises:
            MismatchError: For a state of another encoder, or with other accumulators, shapes or types.
            DeviceError: For a state on another device.
        """
        if not isinstance(state, State):
            raise MismatchError(f"a State is needed here, from encoder.update() or encoder.empty(); got {type(state).__name__}")
        origin = self.origin
        device = self._reader(origin).device
        if device not in (None, state.device):
            raise DeviceError(f"the state is on {state.device}, the encoder is on {device}: use state.to(device)")
        if state.origin is origin:
            return
        if state.origin is None or not state.origin.same_as(origin):
            raise MismatchError(
                f"this state was made by another encoder (fingerprint {state.fingerprint}) than the one that should use it "
                f"({origin.fingerprint}): architecture or weights differ. Load the weights that made it, or encode again."
            )
        if state.origin.loaded:
            check_accumulators(state, self._example(self.pool.pass_of(state)))
        state.origin = origin  # equal: from now on one comparison of pointers is enough

    @torch.no_grad()
    def _example(self, number: int = 1) -> State:
        """A state of one element in a pass, or of none if the width of the features is not known."""
        cache, key = self.origin.known, f"example of pass {number}, training={self.pool.training}"
        if key not in cache:
            state = (
                self.empty(1, generator=torch.Generator()) if number == 1 else self.next_unchecked(self._example(number - 1))
            )
            width = self.pool.in_dim or self._feature_width()
            if width is not None:
                features = torch.zeros(1, 1, width, device=state.device, dtype=self._feature_dtype())
                parts = self.pool.accumulate(self.pool.prepare(state), features, None)
                state = state + State(state.accumulators | parts, torch.ones_like(state.count), state.origin)
            cache[key] = state
        return cache[key]

    def _feature_width(self) -> int | None:
        """The width of phi's features, if phi runs without elements: for the states of pools that take any width."""
        cache = self.origin.known
        if "width" not in cache:
            cache["width"], width = None, self.width()
            if width is not None:
                with torch.no_grad(), suppress(Exception):  # a user's phi may fail without elements
                    nothing = torch.zeros(0, width, dtype=self._feature_dtype(), device=self.device)
                    cache["width"] = int(self.phi(nothing).shape[-1])
        return cache["width"]

    def cast(self, elements: Tensor) -> Tensor:
        """Elements in the dtype that phi takes."""
        return cast_elements(elements, self.phi, parameter_dtype(self.phi)) if self.cast_input else elements

    def _feature_dtype(self) -> torch.dtype:
        return parameter_dtype(self.phi) or torch.get_default_dtype()

    def width(self) -> int | None:
        """The numbers per element, if phi begins with a linear layer or a norm; otherwise None."""
        return element_width(self.phi)

    @property
    def device(self) -> torch.device | None:
        """The device of the weights; None if there are none: elements may then be on any device."""
        tensor = next(chain(self.parameters(), self.buffers()), None)
        return None if tensor is None else tensor.device

    @property
    def origin(self) -> Origin:
        """The current structure and weights, which identify the encoder of a state."""
        if self._origin is None or not self._origin.current():
            self._origin = Origin(self)
        return self._origin

    def _empty(self, batch: int, device: torch.device, generator: torch.Generator | None = None) -> State:
        width = self._feature_width() if self.pool.in_dim is None else None
        state = self.pool.empty(batch, device, generator, width)
        state.origin = self.origin
        return state

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_origin": None}  # belongs to these weights in this process
