"""Products with weights, their biases and look-ups of tables, each recorded as nodes.

The counterpart of `nn/ops/products.py`. A contraction's collectives and FLOPs come from the algebra, forward
and backward.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from meshwright.cost.arrays import is_zero
from meshwright.cost.graph import Node, Transfer, Value, Work
from meshwright.cost.recorder import FLASH, Lowering, MeshSizes, PassShape, Recorder
from meshwright.dtypes import dtype_bytes, number_type
from meshwright.layout import Layout
from meshwright.layout.contractions import contraction_of, input_groups
from meshwright.layout.grouped import Blocks
from meshwright.models.at_layer import Places
from meshwright.models.config import ModelConfig
from meshwright.notation.array import ShardedArray
from meshwright.notation.einsum import Contraction
from meshwright.notation.operation import bias_reshard
from meshwright.units import Numeric, whole

# A kernel that quantises reads two bytes of an element and writes one; one more byte finds the scales.
CAST_BYTES = 4
# Kernels next to the product in a turn of a loop over blocks that copies its operands. For products of rows:
# the slice of rows, the write of the result into its stack, and the counter. For a weight's gradient: masks
# and slices of two arrays, the sum, and the counter. Counted in programs of XLA for GPUs, jax 0.10.2.
_ROW_KERNELS, _SUM_KERNELS = 3, 7


class ProductOps(Recorder):
    """Embeddings, products and biases of `models/transformer.py`."""

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        shape: PassShape,
        lowering: Lowering = FLASH,
        many: MeshSizes | None = None,
    ) -> None:
        super().__init__(config, layout, shape, lowering, many)
        self._quantised: dict[int, Value] = {}
        self._looks_up = False  # whether a look-up of the table has been recorded

    def embed(self, name: str, tokens: Value, table: Value) -> Value:
        """Rows of table[V_tensor, D]: gathered over fsdp, looked up, summed over tensor.

        A look-up is the product of one-hot rows with the table, without its FLOPs.
        """
        dtype = self.layout.precision.compute_dtype
        out, lookup = self.activation_value("x", "BTD"), contraction_of(self.layout, name, "BTV,VD->BTD")
        gather = lookup.rhs_reshard
        # A draft head looks up rows of the table that was gathered before.
        rows = self.fetch(name, table, replace(gather, given=gather.used) if self._looks_up else gather)
        self._looks_up = True
        moved = (Work(hbm_bytes=2 * out.bytes_per_device),)
        share = self._rows_sent(name, table, lookup)
        spread = self.transfers("activations", lookup.out_reshard.backward, name, dtype, critical=True)
        if table.frozen:
            spread = ()
        return self.add(
            Node(
                name,
                "embed",
                (tokens, rows),
                (out,),
                (tokens,),
                forward=moved,
                backward=() if table.frozen else moved,
                forward_transfers=share,
                backward_transfers=spread,
            )
        )

    def _rows_sent(self, name: str, table: Value, lookup: Contraction) -> tuple[Transfer, ...]:
        """Transfers of looked-up rows from the devices that have them."""
        steps, dtype = lookup.out_reshard.forward, self.layout.precision.compute_dtype
        return self.transfers("activations", steps, name, dtype, critical=True)

    def add_positions(self, name: str, x: Value, places: Places, table: Value) -> Value:
        """x plus rows of a learned table[W, D]."""
        lookup = contraction_of(self.layout, name, "BTW,WD->BTD")
        rows = self.fetch(name, table, lookup.rhs_reshard)
        return self.elementwise(name, (x, x), self.value(x.array, x.dtype), (places.positions, rows))

    def bias(self, name: str, y: Value, b: Value) -> Value:
        """Fused with the product; its gradient is one more sum."""
        self.fused.add(name)
        reshard_of_bias = bias_reshard(y.array, b.array)
        if not reshard_of_bias.forward:
            self.sum_gradient(name, b, reshard_of_bias.yielded)
            return y
        used = self.fetch(name, b, reshard_of_bias)
        # A recomputation of y reads b again.
        made = next(i for i, node in enumerate(self.nodes) if any(out is y for out in node.outputs))
        self.nodes[made] = replace(self.nodes[made], inputs=(*self.nodes[made].inputs, used))
        return y

    # Contractions

    def kept(self, name: str, x: Value) -> Value:
        """x, kept for the backward pass in a narrower type.

        A product casts its operand to that type in any case.
        """
        if self.layout.precision.saved_dtype and self.layout.phase == "train":
            self._narrow(x)
        return x

    def _narrow(self, x: Value) -> None:
        """Record the bytes of x in the narrower type."""
        precision, length = self.layout.precision, self._local(x.array, x.array.dims[-1])
        assert precision.saved_dtype is not None, "only a layout with a saved_dtype keeps values narrower"
        each_number = number_type(precision.saved_dtype).saved_bytes(length, precision.matmul_scales)
        self._narrowed[id(x)] = whole(self.elements(x.array) * each_number)

    def einsums(self, x: Value, weights: Mapping[str, Value], **specs: str) -> tuple[Value, ...]:
        """Contractions of one input: moved once, with cotangents summed before they move."""
        made: dict[str, Value] = {}
        for group in input_groups(self.layout, specs):
            is_sent = group.is_sent
            moved = self.reshard(
                group.name, "move", x, group.reshard, x.dtype, critical=True, is_there=is_sent
            )
            if id(x) in self._narrowed and moved is not x:
                self._narrow(moved)
            for name, plan in group.plans.items():
                made[name] = self._einsum(name, plan, moved, weights[name])
        return tuple(made[name] for name in specs)

    def _einsum(self, name: str, plan: Contraction, x: Value, stored: Value) -> Value:
        dtype = self.layout.precision.compute_dtype
        w = self.fetch(name, stored, plan.rhs_reshard)
        partial = self.value(plan.product, dtype)
        if "E" in plan.einsum.batched or not plan.einsum.batched:
            self._quantise(name, x, w, partial)
        rows, inner, columns, batch = self._product_shape(plan, x, w)
        read, taken = self.read_share(plan), self.multiplied_share(plan.product)
        rows = rows * taken
        kernels = -(-batch * read // 1)  # one of each expert here
        flops = plan.flops_per_device(self.mesh, self.sizes) * taken
        routed = "E" in plan.einsum.lhs and "E" in plan.einsum.rhs
        rows_moved = (x.bytes_per_device + partial.bytes_per_device) * taken
        widened = dtype_bytes(w.dtype) < dtype_bytes(self.layout.precision.matmul_dtype or dtype)
        weight_bytes = w.bytes_per_device * read
        blocks = self.expert_rows.blocks if routed else None
        looped = 0 if blocks is None else 1 - blocks.least
        product = Work(
            flops, rows_moved + weight_bytes, kernels, (rows, inner, columns), batch, routed, looped=looped
        )
        of_weight = replace(product, shape=(inner, rows, columns))
        copies: tuple[Work, ...] = ()
        if blocks is not None:
            reads = self.reads_of_weight(blocks)
            kernels -= blocks.least * (kernels - 1)
            product = replace(product, hbm_bytes=rows_moved + weight_bytes * reads, kernels=kernels)
            of_weight = self._of_weight(of_weight, w, rows_moved, blocks)
            copies = self._copies(weight_bytes * reads, rows_moved, blocks)
        self.add(
            Node(
                name,
                "matmul",
                (x, w),
                (partial,),
                (w,) if stored.frozen else (x, w),
                forward=(replace(product, widened=widened, wide=self.multiplies_wide(w)), *copies),
                backward=(replace(product, shape=(rows, columns, inner)), *copies),
                weight_gradient=() if stored.frozen else (of_weight,),
                carried=0 if blocks is None else self._carried(stored, blocks),
            )
        )
        return self.reshard(name, "reduce", partial, plan.out_reshard, dtype, critical=True)

    def _of_weight(self, work: Work, w: Value, rows_moved: Numeric, blocks: Blocks) -> Work:
        """The gradient of experts' weights: products of some blocks of rows, the last of them masked.

        The gradient is a float32 sum: filled with zeros, read and written for each product, and cast at the
        end. A loop that copies also writes and reads each product's result and rows, in further kernels.
        """
        more = blocks.sums * blocks.together / blocks.even
        moved = rows_moved * more * (1 + 2 * blocks.copied)
        kernels = work.kernels + _SUM_KERNELS * blocks.sums * blocks.copied
        in_float32 = self.elements(w.array) * dtype_bytes("f32")
        of_a_sum = 2 + 2 * blocks.copied
        of_sums = (
            of_a_sum * blocks.sums / self.expert_rows.local_experts + 2
        ) * in_float32 + w.bytes_per_device
        return replace(work, flops=work.flops * more, hbm_bytes=moved + of_sums, kernels=kernels)

    def _carried(self, stored: Value, blocks: Blocks) -> Any:
        """Bytes of experts' weights and gradients while further passes run; 0 if one pass takes all rows.

        These are the layer's slice of the stacked weights and, if they are trained, the gradients of the
        first pass and the sum of gradients over passes, all sharded as the weights are stored.
        """
        precision = self.layout.precision
        dtype = precision.gradients_dtype or precision.compute_dtype
        gradients = 0 if stored.frozen else 2 * self.elements(stored.array) * dtype_bytes(dtype)
        return (blocks.capacity < blocks.most) * (stored.bytes_per_device + gradients)

    def _copies(self, read_bytes: Any, rows_bytes: Any, blocks: Blocks) -> tuple[Work, ...]:
        """The copies that a loop makes for its products, in separate kernels; () for loops without copies.

        read_bytes, rows_bytes: bytes of weights and rows that the products read and write. Each turn copies
        rows out of their stack and the result into its stack, and increments the loop's counter. It copies
        the expert's weights too, unless the stack has only one expert.
        """
        if is_zero(blocks.copied):
            return ()
        of_weights = blocks.copied * (self.expert_rows.local_experts > 1)
        of_rows = Work(
            hbm_bytes=2 * rows_bytes * blocks.copied,
            kernels=_ROW_KERNELS * blocks.even * blocks.copied,
            looped=blocks.copied,
        )
        if is_zero(of_weights):
            return (of_rows,)
        kernels = blocks.even * of_weights
        return of_rows, Work(hbm_bytes=2 * read_bytes * of_weights, kernels=kernels, looped=of_weights)

    def reads_of_weight(self, blocks: Blocks) -> Any:
        """How often a product reads an expert's weight: once for each block of its rows, by even load."""
        return blocks.even / self.expert_rows.local_experts

    def multiplied_share(self, array: ShardedArray) -> Any:
        """The share of an array that is computed: only existing rows of experts."""
        return self.expert_rows.multiplied if "C" in array.dims else 1.0

    def multiplies_wide(self, w: Value) -> bool:
        """Whether a weight is multiplied in the type of activations where others have a narrower one."""
        return False

    def read_share(self, plan: Contraction) -> Any:
        """The share of a product's weights that it reads: all in training."""
        return 1.0

    def _product_shape(self, plan: Contraction, x: Value, w: Value) -> tuple[float, float, float, float]:
        """(rows, contracted, columns, products at once) on one device."""
        e = plan.einsum
        x_elements, w_elements = self.elements(x.array), self.elements(w.array)
        batch = prod(self._local(x.array, letter) for letter in e.batched)
        inner = prod(self._local(x.array, letter) for letter in e.lhs if letter in e.contracted)
        return x_elements / batch / inner, inner, w_elements / batch / inner, batch

    def _local(self, array: ShardedArray, letter: str) -> float:
        return self.sizes[letter] / self.mesh.size(array.axes_of(letter))

    def _quantise(self, name: str, x: Value, w: Value, product: Value) -> None:
        """Casts of the operands, and of the cotangent in the backward pass, to the products' type."""
        self._cast(name, x, w, product, self.layout.precision.matmul_dtype)

    def _cast(
        self, name: str, x: Value, w: Value, product: Value, dtype: str | None, *, routed: bool = False
    ) -> None:
        """Record the casts of the operands, and of the cotangent in the backward pass, to `dtype`.

        Weights change once a step, so their cast serves all microbatches. dtype: None for no cast; nor is
        there one to a type as wide as activations. routed: as in `Work`.
        """
        if dtype is None or dtype_bytes(dtype) >= dtype_bytes(self.layout.precision.compute_dtype):
            return
        times = {id(x): 1.0, id(w): 1 / self.microbatches, id(product): 1.0}
        fresh = [value for value in dict.fromkeys((x, w)) if id(value) not in self._quantised]
        self._quantised |= {id(value): value for value in fresh}
        forward, backward = (
            tuple(
                Work(hbm_bytes=CAST_BYTES * times[id(v)] * self.elements(v.array), routed=routed)
                for v in values
            )
            for values in (fresh, (product,))
        )
        self.add(Node(f"{name}_cast", "cast", (x, w), (product,), forward=forward, backward=backward))
