"""Values, transfers and nodes of symbolic operations, under one layout and shape."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from meshwright.cost.expert_rows import NO_EXPERTS, expert_rows_of
from meshwright.cost.graph import (
    Cargo,
    Graph,
    Node,
    Segment,
    StoredWeights,
    Transfer,
    Value,
    WeightsPlace,
    Work,
)
from meshwright.dtypes import dtype_bytes, number_type
from meshwright.layout import Layout
from meshwright.layout.moves.attention import token_sharding
from meshwright.layout.moves.experts import has_fixed_rows
from meshwright.layout.precision import Precision
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import ENTERING, Param, dimensions, stacked_layers
from meshwright.notation.array import ShardedArray
from meshwright.notation.collective import Collective, gathered_of_block, reshard
from meshwright.notation.einsum import Reshard
from meshwright.notation.mesh import Degrees
from meshwright.optimizers import OPTIMIZERS
from meshwright.optimizers.optimizer import Exchange, WeightShard
from meshwright.platforms.platform import ExpertBlocks, Kernel
from meshwright.units import whole


@dataclass(frozen=True)
class PassShape:
    """The letters that the workload fixes: sequences B (of one microbatch), T queries, S keys.

    num_sequences: an array of them where many layouts are recorded at once. document_len: of a Workload.
    """

    num_sequences: Any
    query_len: int
    key_len: int
    document_len: int | None = None

    @classmethod
    def of_microbatch(cls, workload: Workload, layout: Layout) -> "PassShape":
        """One microbatch of a training step, over all batch shards."""
        sequences, length = workload.num_sequences / layout.schedule.microbatches, workload.seq_len
        return cls(sequences, length, length, workload.document_tokens)


@dataclass(frozen=True)
class Lowering:
    """A program's forms of attention, the head and experts.

    flash_attention: only one block of scores is in memory, and masked blocks are skipped. by_blocks: by XLA's
    operations, whose scores cross memory block by block. kernel: by this kernel. head_tile: heads are padded
    to a multiple of it. scores_dtype: of scores in memory, without flash attention. wide_logits: logits that
    are capped or made of narrow operands are kept in float32, too. caps_apart: the gradient of capped logits
    is an array of its own. head_tokens: tokens of a device in a chunk of the head; None: all at once.
    static_blocks: sizes of the blocks of experts' rows, in a program of static shapes (`blocks_of`); None:
    rows follow the load. solves_by_products: triangular systems are solved by products with their inverses.
    loops_over_chunks: recurrences are XLA's loops over chunks of positions, whose kernels pass float32 arrays
    through memory; otherwise one kernel keeps them on chip. lanes: columns of the tiles of arrays.
    adds_shared: partial sums of chosen and of shared experts are added before one all-reduce.
    casts_weights: as in `TrainingProgram`.
    """

    flash_attention: bool = True
    by_blocks: bool = False
    kernel: Kernel | None = None
    head_tile: int = 1
    scores_dtype: str = "f32"
    wide_logits: bool = False
    caps_apart: bool = False
    head_tokens: int | None = None
    static_blocks: ExpertBlocks | None = None
    solves_by_products: bool = False
    loops_over_chunks: bool = False
    lanes: int = 1
    adds_shared: bool = False
    casts_weights: bool = False


# Flash attention, and no other form that is particular to a platform.
FLASH = Lowering()

# Letters of the head dimension of queries and keys, and of values.
_HEAD_DIMENSIONS = ("H", "O")


class MeshSizes(NamedTuple):
    """Degrees of the mesh axes and the microbatches of a step: of a layout, or arrays of them of many."""

    mesh: Degrees
    microbatches: Any


class Recorder:
    """Records nodes for one model, layout and shape.

    Sizes may be fractions (a batch that does not divide), since they are only multiplied. Of layouts with
    one pattern all can be recorded at once: `many` has arrays of their sizes then, and every figure of the
    graph that follows from them is an array too.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        shape: PassShape,
        lowering: Lowering,
        many: MeshSizes | None = None,
    ) -> None:
        self.config, self.layout, self.lowering = config, layout, lowering
        self.document_len = shape.document_len
        self.mesh, self.microbatches = many or MeshSizes(layout.mesh, layout.schedule.microbatches)
        self.sizes: dict[str, Any] = {
            **dimensions(config),
            "B": shape.num_sequences,
            "T": shape.query_len,
            "S": shape.key_len,
        }
        self.expert_rows = NO_EXPERTS
        if config.moe:
            static_blocks = lowering.static_blocks
            self.expert_rows = expert_rows_of(
                config.moe, layout, self.mesh, shape.num_sequences, shape.query_len, static_blocks
            )
            self.sizes["C"] = self.expert_rows.capacity
        self.segments: list[Segment] = []
        self.layer_segments: list[int] = []
        self.nodes: list[Node] = []
        self._narrowed: dict[int, Any] = {}  # bytes of values that are kept narrower than they are made
        self.fused: set[str] = set()  # names of operations that are no nodes
        self.wide: set[str] = set()  # names of operations whose products are float32
        self._used: set[int] = set()
        self._used_here: list[int] = []
        self._stored: dict[str, StoredWeights] = {}
        # Elements and bytes of blocks, which many values share. Keys have ids of sizes; the sizes are kept as
        # well, so that no later object gets the id of one of them.
        self._block_elements: dict[tuple, tuple[list[Any], Any]] = {}
        self._block_bytes: dict[tuple[int, str], Any] = {}

    def graph(self) -> Graph:
        """The recorded graph, with the nodes since the layers as the last segment."""
        self.close("head", 1)
        return Graph(
            tuple(self.segments),
            tuple(self.layer_segments),
            tuple(self._stored.values()),
            fused=frozenset(self.fused),
            wide=frozenset(self.wide),
        )

    def close(
        self,
        name: str,
        count: int,
        source: Value | None = None,
        handed_on: tuple[Value, ...] = (),
        shared: tuple[Value, ...] = (),
    ) -> None:
        """Makes the nodes since the last segment a segment that runs `count` times."""
        if self.nodes:
            self.segments.append(
                Segment(name, tuple(self.nodes), count, source, handed_on, shared, self._narrowed)
            )
        self.nodes, self._narrowed = [], {}
        # Layers with other windows are recorded with the same weights, but use separate ones.
        self._used |= set() if source else set(self._used_here)
        self._used_here = []

    def add(self, node: Node) -> Value:
        """Append a node; returns its first output."""
        self.nodes.append(node)
        return node.outputs[0]

    # Values

    def value(self, array: ShardedArray, dtype: str) -> Value:
        elements, padding = self.elements(array), _padding(array, self.sizes, self.lowering.head_tile)
        key = id(elements), dtype
        if key not in self._block_bytes:
            self._block_bytes[key] = _read_only(whole(elements * dtype_bytes(dtype)))
        num_bytes = self._block_bytes[key]
        return Value(array, dtype, num_bytes, padding_bytes=whole(num_bytes * padding) if padding else 0)

    def tokens(self, name: str) -> Value:
        """An integer input: tokens, targets or positions [B, T]."""
        return self.value(token_sharding(self.layout, name), "i32")

    def weight(self, path: str, param: Param) -> Value:
        """A weight of one layer as it is stored; the whole stack counts as stored.

        Fractions of a shard round up. A weight that is not trained has no gradient and no optimizer state.
        """
        of_model, self.sizes = self.sizes, {**self.sizes, **dimensions(self.config, path)}
        stack, _, name = path.rpartition("/")
        letters, trained = param.letters, param.trained
        stored, dtype = self.layout.weight(name, letters), self.layout.precision.stored_dtype(path, param)
        summed = [letter for letter in param.fan_in if letter in letters]
        inputs = prod(self.sizes[letter] / self.mesh.size(stored.axes_of(letter)) for letter in summed)
        bytes_each = self.layout.precision.weight_bytes(path, param, inputs)
        updated = self.layout.rules.updated.weight(name, letters)
        shard = WeightShard(path, param, updated, self.sizes, self.mesh)
        optimizer = OPTIMIZERS[self.layout.precision.optimizer]
        part = stack or name
        added = self._stored.get(part) or StoredWeights(
            part, _place(self.config, stack, name), stacked_layers(self.config, stack)
        )
        elements = self._whole_elements(stored)
        added = added.plus(stored=elements, stored_bytes=elements * bytes_each)
        if trained:
            added = added.plus(
                accumulated=self._whole_elements(self.layout.rules.gradients.weight(name, letters)),
                updated=shard.elements,
                optimizer=optimizer.state_elements(shard),
                optimizer_blocks=optimizer.state_blocks(shard),
                update_flops=optimizer.flops(shard),
                exchanged=_exchanged(optimizer.exchanges(shard), name, self.mesh),
            )
        self._stored[part] = added
        of_a_layer = letters[1:] if stack else letters
        value = self.value(self.layout.weight(name, of_a_layer), dtype)
        if number_type(dtype).scales or param.wide_share:
            value = replace(value, bytes_per_device=whole(self.elements(value.array) * bytes_each))
        self.sizes = of_model
        return value if trained else replace(value, frozen=True)

    def store_tower(self, num_params: int) -> None:
        """Weights of the parts that see or hear: whole on each device of the first stage, not trained."""
        num_bytes = num_params * dtype_bytes(self.layout.precision.weights_dtype)
        self._stored["tower"] = StoredWeights("tower", "first", stored=num_params, stored_bytes=num_bytes)

    def _whole_elements(self, array: ShardedArray) -> Any:
        """Elements of the largest block that a device has."""
        size = self.mesh.size
        pairs = zip(array.dims, array.axes, strict=True)
        return prod(-(-self.sizes[dim] // size(axes)) for dim, axes in pairs)

    def activation_value(self, name: str, letters: str) -> Value:
        return self.value(self.layout.activation(name, letters), self.layout.precision.compute_dtype)

    def elements(self, array: ShardedArray) -> float:
        """Elements of one device's block."""
        sizes = [self.sizes[dim] for dim in array.dims]
        key = array.dims, array.axes, *map(id, sizes)
        if key not in self._block_elements:
            splits = map(self.mesh.size, array.axes)
            elements = prod(size / split for size, split in zip(sizes, splits, strict=True))
            self._block_elements[key] = sizes, _read_only(elements)
        return self._block_elements[key][1]

    # Transfers

    def transfers(
        self,
        what: Cargo,
        steps: Iterable[Collective],
        tensor: str,
        dtype: str,
        *,
        critical: bool,
        once: bool = False,
    ) -> tuple[Transfer, ...]:
        # Only existing rows of experts travel, regardless of the capacity.
        mesh, sizes = self.mesh, self.sizes
        sizes = sizes | {"C": self.expert_rows.even} if self.config.moe else sizes
        return tuple(
            Transfer(what, s.op, s.axes, tensor, s.gathered_bytes(mesh, sizes, dtype), dtype, critical, once)
            for s in steps
            if s.op != "slice"
        )

    def gradient_transfers(
        self, weight: ShardedArray, yielded: ShardedArray, dtype: str
    ) -> tuple[Transfer, ...]:
        """Collectives from partial sums of a weight's cotangent to its accumulated gradient.

        Every microbatch reduce-scatters if gradients accumulate sharded (ZeRO 2 and 3). Sums over replicas
        run once a step: until then each replica accumulates its own gradient, in the type of gradients.
        """
        letters = "".join(weight.dims)
        rules = self.layout.rules
        home, adds = (table.weight(weight.name, letters) for table in (rules.updated, rules.gradients))
        if self.layout.schedule.microbatches == 1:
            at_once = {"reduce_scatter"} if adds == home else set()
            steps = [(step, step.op not in at_once, dtype) for step in _reduced(yielded, home)]
        else:
            adding = _adding(yielded, adds)
            added = self.layout.precision.accumulated_dtype
            steps = [(step, False, dtype) for step in _reduced(yielded, adding)]
            steps += [(step, True, added) for step in _reduced(adding, home)]
        return tuple(
            transfer
            for step, once, sent in steps
            for transfer in self.transfers("gradients", [step], weight.name, sent, critical=False, once=once)
        )

    def update_transfers(self, weight: ShardedArray) -> tuple[Transfer, ...]:
        """The gather of a weight after its shards were updated separately (ZeRO 1 and 2)."""
        updated = self.layout.rules.updated.weight(weight.name, "".join(weight.dims))
        steps = _regathered(updated, weight)
        casts_weights = self.lowering.casts_weights
        dtype = _updated_dtype(self.layout.precision, weight, casts_weights=casts_weights)
        return self.transfers("updated weights", steps, weight.name, dtype, critical=False, once=True)

    def _moves(self, transfers: Iterable[Transfer]) -> Any:
        """Whether any of the transfers is over more than one device."""
        return sum(self.mesh.size(one.axes) > 1 for one in transfers) > 0

    # Nodes

    def elementwise(
        self,
        name: str,
        inputs: tuple[Value, ...],
        output: Value,
        needs: tuple[Value, ...],
        *,
        forward_transfers: tuple[Transfer, ...] = (),
        backward_transfers: tuple[Transfer, ...] = (),
        unfused_bytes: int = 0,
        steps: str = "",
        unfused_traffic: int = 0,
        share: Any = 1,
    ) -> Value:
        """A memory-bound operation: the backward reads the inputs and the cotangent and writes one.

        unfused_bytes: kept by its `steps` if nothing fuses them. unfused_traffic: their traffic then. share:
        of the arrays that is read and written.
        """
        written = share * output.bytes_per_device
        moved = share * sum(value.bytes_per_device for value in inputs) + written
        return self.add(
            Node(
                name,
                "elementwise",
                inputs,
                (output,),
                needs,
                forward=(Work(hbm_bytes=moved, unfused_bytes=unfused_traffic),),
                backward=(Work(hbm_bytes=moved + written, unfused_bytes=2 * unfused_traffic),),
                forward_transfers=forward_transfers,
                backward_transfers=backward_transfers,
                unfused_bytes=unfused_bytes,
                steps=steps,
                fixed_rows=has_fixed_rows(self.layout),
            )
        )

    def reshard(
        self,
        name: str,
        kind: str,
        x: Value,
        reshard: Reshard,
        dtype: str,
        *,
        critical: bool,
        what: Cargo = "activations",
        is_there: bool = False,
    ) -> Value:
        """`x` after its reshard, in `dtype`: a node, unless nothing moves or changes.

        is_there: another reshard has moved `x` already, so that only the cotangent moves.
        """
        forward = () if is_there else self.transfers(what, reshard.forward, name, dtype, critical=critical)
        backward = self.transfers(what, reshard.backward, name, dtype, critical=critical)
        if not forward and not backward and x.dtype == dtype:
            return x
        out = self.value(reshard.used, dtype)
        if x.dtype == dtype:
            out = replace(out, is_copy=not is_there and self._moves((*forward, *backward)))
        node = Node(name, kind, (x,), (out,), forward_transfers=forward, backward_transfers=backward)
        return self.add(replace(node, scratch=self._rows_to_add(out, backward)))

    def _rows_to_add(self, rows: Value, transfers: Sequence[Transfer]) -> Any:
        """Bytes of all devices' terms of experts' rows, which a backward reduce-scatter then adds."""
        if self.expert_rows.blocks is None or "C" not in rows.array.dims or self.layout.phase != "train":
            return 0
        scattered = (transfer for transfer in transfers if transfer.op == "reduce_scatter")
        return sum(self.mesh.size(transfer.axes) * rows.bytes_per_device for transfer in scattered)

    def fetch(self, name: str, stored: Value, reshard: Reshard) -> Value:
        """A weight for its product, gathered over the axes that ZeRO 3 stores it over."""
        dtype = self.layout.precision.compute_dtype
        forward = self.transfers("weights", reshard.forward, name, dtype, critical=False)
        backward = self.gradient_transfers(
            stored.array.replace(name=name), reshard.yielded, self.layout.precision.gradients_dtype or dtype
        )
        update = self.update_transfers(stored.array.replace(name=name))
        if stored.frozen:
            backward = update = ()
        elif not self._is_first_use(stored):
            # Its gradient is added to the first use's before the sum over devices, if that is not at once.
            at_once = not update
            waits = self.layout.schedule.microbatches > 1
            kept = tuple(t for t in backward if at_once and not (t.once and waits))
            part = self._stored[stored.name]
            self._stored[stored.name] = part._replace(summed=tuple(t for t in backward if t not in kept))
            backward, update = kept, ()
        if not (forward or backward or update) and stored.dtype == dtype:
            return stored
        used = self.value(reshard.used, dtype)
        if stored.dtype == dtype:
            used = replace(used, is_copy=self._moves(forward))
        widening: tuple[Work, ...] = ()
        if stored.frozen and number_type(stored.dtype).scales:
            # Again in the backward pass, as a gather is, since no wide copy is kept.
            wide_bytes = self.elements(stored.array) * dtype_bytes(dtype)
            widening = (Work(hbm_bytes=stored.bytes_per_device + wide_bytes),)
        return self.add(
            Node(
                name,
                "gather",
                (stored,),
                (used,),
                forward=widening,
                forward_transfers=forward,
                backward_transfers=backward,
                update_transfers=update,
            )
        )

    def _is_first_use(self, stored: Value) -> bool:
        """Whether no part of the model before has used the weight, as the embedding does of a tied one."""
        self._used_here.append(id(stored))
        return id(stored) not in self._used

    def sum_gradient(self, name: str, stored: Value, yielded: ShardedArray) -> None:
        """The gradient of a small weight that is used as it is stored: a float32 sum."""
        weight = stored.array.replace(name=name)
        backward, update = self.gradient_transfers(weight, yielded, "f32"), self.update_transfers(weight)
        if (backward or update) and not stored.frozen:
            self.add(
                Node(
                    name, "gather", (stored,), (stored,), backward_transfers=backward, update_transfers=update
                )
            )


def _read_only(figure: Any) -> Any:
    """A number or array that several values share; an array refuses writes."""
    if not isinstance(figure, float | int):
        figure.flags.writeable = False
    return figure


def _padding(array: ShardedArray, sizes: Mapping[str, Any], tile: int) -> float:
    """The share that tiles of a kernel, with H as minor dimension, add to queries, keys and values."""
    if array.dims[:1] != ("B",) or array.dims[-1] not in _HEAD_DIMENSIONS:
        return 0.0
    size = sizes[array.dims[-1]]
    return -(-size // tile) * tile / size - 1


def _place(config: ModelConfig, stack: str, name: str) -> WeightsPlace:
    """The stages that hold a weight."""
    if stack:
        return "layers"
    if name == "embed":
        return "first and last" if config.tied_embeddings else "first"
    return "first" if name in ENTERING else "last"


def _exchanged(exchanges: Iterable[Exchange], name: str, mesh: Degrees) -> tuple[Transfer, ...]:
    """The optimizer's collectives on the shards of a weight, in float32."""
    return tuple(
        Transfer(
            exchange.what,
            exchange.op,
            exchange.axes,
            name,
            gathered_of_block(exchange.op, exchange.elements * dtype_bytes("f32"), mesh.size(exchange.axes)),
            "f32",
            critical=True,
            repeat=exchange.times,
        )
        for exchange in exchanges
    )


@lru_cache(maxsize=8192)
def _reduced(yielded: ShardedArray, accumulated: ShardedArray) -> tuple[Collective, ...]:
    return tuple(reshard(yielded, accumulated.replace(name=yielded.name)))


@lru_cache(maxsize=8192)
def _adding(yielded: ShardedArray, home: ShardedArray) -> ShardedArray:
    """The array of gradients that microbatches add to.

    It is sharded as `home`, with the partial sums of `yielded`.
    """
    return home.replace(unreduced=tuple(axis for axis in yielded.unreduced if axis not in home.sharded_axes))


def _updated_dtype(precision: Precision, weight: ShardedArray, *, casts_weights: bool) -> str:
    """The type in which an updated weight is gathered.

    It is that of products in 8 bits, if the program casts weights. Norms, biases, the embedding and the head
    stay wide.
    """
    stays_wide = len(weight.dims) == 1 or "V" in weight.dims
    is_cast = casts_weights and not stays_wide and number_type(precision.operand_dtype).bits == 8
    return precision.operand_dtype if is_cast else precision.trained_dtype


@lru_cache(maxsize=8192)
def _regathered(accumulated: ShardedArray, stored: ShardedArray) -> tuple[Collective, ...]:
    return tuple(reshard(accumulated, stored))
