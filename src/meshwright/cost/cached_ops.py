"""Operations of a forward pass with a cache, recorded: the cost of what nn/cached_ops.py computes.

Weights and caches are read in their stored type, and widened for the product. The scales of quantised ones
count. models/count.py defines the contents of a cache and the part that a layer reads: a local layer's
window, one latent for all heads, one cache for several layers. Attention has the form of the programs of
serve/ (`attention_form`): whole prompts by a kernel or block by block, others over pages.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import comb
from typing import Any, Literal

from meshwright.cost.arrays import larger, largest, smaller
from meshwright.cost.graph import Node, Transfer, Value, Work
from meshwright.cost.ops.attention import positions_of_entry
from meshwright.cost.ops.symbolic import SymbolicOps
from meshwright.cost.recorder import FLASH, Lowering, PassShape
from meshwright.dtypes import dtype_bytes
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.attention_kernels import lacks_flash, why_no_paged
from meshwright.layout.contractions import contraction_of
from meshwright.layout.grouped import Blocks
from meshwright.layout.moves.attention import attention_layout, gathered_keys, single_tokens, uses_ring
from meshwright.layout.page_sizes import (
    KEYS_AT_ONCE,
    SIDE_BY_SIDE,
    TOGETHER,
    most_pages,
    page_of,
    pages_read,
)
from meshwright.models.at_layer import AtLayer, Places
from meshwright.models.config import ModelConfig
from meshwright.models.config_tables import MoE
from meshwright.models.count import cache_arrays, cache_scales, read_positions
from meshwright.models.layer_kinds import Window
from meshwright.models.ops import Scoring
from meshwright.models.parameters import dimensions
from meshwright.notation.array import ShardedArray
from meshwright.notation.collective import reshard
from meshwright.notation.einsum import Contraction, Reshard
from meshwright.platforms.platform import PROMPT_ROWS
from meshwright.units import Numeric, whole

AttentionForm = Literal["kernel", "blocks", "pages", "tables"]


def attention_form(
    config: ModelConfig, hardware: Hardware, layout: Layout, queries: int, positions: int, longest: int
) -> AttentionForm:
    """The form of attention for the last `queries` of `positions` on the hardware's chips.

        kernel   on chip: the cache is read once. Every generate step of accelerators is priced in this form,
                 also without a kernel, which the plan then reports (`why_no_paged`)
        blocks   whole prompts without a kernel: XLA's operations, a pair of blocks at a time
        pages    page by page: rows of queries read the used pages of their sequence one after another,
                 unless devices split prompts
        tables   chunks of prompts on accelerators without a kernel for pages: pages are gathered for rows of
                 queries, TOGETHER at a time, up to the last position

    longest: positions of a whole prompt in its program. Other software has kernels for everything.
    """
    if not hardware.software.is_ours:
        return "kernel"
    platform = hardware.chip.platform
    if platform.page_by_page:
        return form_by_pages(layout)
    if layout.phase != "prefill":
        return "kernel"
    if queries == positions:
        return "blocks" if lacks_flash(config, hardware, layout, longest) else "kernel"
    return "tables" if why_no_paged(platform, config, layout.at("generate"), queries) else "kernel"


def form_by_pages(layout: Layout) -> AttentionForm:
    """The form on a platform that attends page by page (`Platform.page_by_page`)."""
    return "blocks" if layout.phase == "prefill" and layout.rules.prompt_axes else "pages"


def keys_read(
    config: ModelConfig, hardware: Hardware, layout: Layout, queries: int, positions: int, longest: int
) -> int:
    """Positions that a pass of the last `queries` of `positions` reads.

    Tables are read in blocks of pages. longest: positions of a table.
    """
    if attention_form(config, hardware, layout, queries, positions, positions) != "tables":
        return positions
    block = TOGETHER * page_of(config, longest)
    return min(longest, -(-positions // block) * block)


@dataclass(frozen=True)
class CacheReads:
    """How a pass reads its cache.

    form: of attention. rows: queries in a row of a prompt. copied_lanes: columns of a tile if each layer's
    pages are gathered into a copy; otherwise 0. verified: whether every query needs logits, as in a step that
    verifies drafts.
    """

    form: AttentionForm = "kernel"
    rows: int = PROMPT_ROWS
    copied_lanes: int = 0
    verified: bool = False


BY_KERNEL = CacheReads()


class CachedOps(SymbolicOps):
    """Records a pass of T queries of each sequence, after S - T positions in the cache.

    lowering: `kernel` is for whole prompts.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        shape: PassShape,
        reads: CacheReads = BY_KERNEL,
        lowering: Lowering = FLASH,
    ) -> None:
        super().__init__(config, layout, shape, replace(lowering, by_blocks=reads.form == "blocks"))
        self.form, self.verified = reads.form, reads.verified
        self._rows, self._lanes = reads.rows, reads.copied_lanes
        self._page = page_of(config, shape.key_len)
        self._read_shares: dict[MoE, Any] = {}  # all products of an expert have the same share
        # Prompts whose positions are split are kept as generation reads them.
        self._kept_as = layout.at("generate") if layout.table.position_axes else layout

    def take(self, name: str, x: Value, indices: Value) -> Value:
        """The tokens whose logits are wanted, on all devices that share positions."""
        if self.verified:
            return x
        self.layout, over = single_tokens(self.layout), x.array.axes_of("T")
        out = super().take(name, x, indices)
        partial = out.array.replace(unreduced=over)
        sent = self.transfers("activations", reshard(partial, out.array), name, x.dtype, critical=True)
        return self.add(Node(name, "move", (x,), (out,), forward_transfers=sent)) if sent else out

    def fetch(self, name: str, stored: Value, reshard: Reshard) -> Value:
        """A weight for its product, in its stored type if that is narrower."""
        if dtype_bytes(stored.dtype) >= dtype_bytes(self.layout.precision.compute_dtype):
            return super().fetch(name, stored, reshard)
        gathers = self.transfers("weights", reshard.forward, name, stored.dtype, critical=False)
        if not gathers:
            return stored
        out = self.value(reshard.used, stored.dtype)
        return self.add(Node(name, "gather", (stored,), (out,), forward_transfers=gathers))

    def _rows_sent(self, name: str, table: Value, lookup: Contraction) -> tuple[Transfer, ...]:
        """Rows of a quantised table, and their scales, one number per row."""
        if dtype_bytes(table.dtype) >= dtype_bytes(self.layout.precision.compute_dtype):
            return super()._rows_sent(name, table, lookup)
        scales = contraction_of(self.layout, name, "BTV,V->BT").out_reshard.forward
        sent = ((lookup.out_reshard.forward, table.dtype), (scales, "f32"))
        return tuple(
            transfer
            for steps, dtype in sent
            for transfer in self.transfers("activations", steps, name, dtype, critical=True)
        )

    def multiplies_wide(self, w: Value) -> bool:
        """Whether a weight is stored wide: its product is then neither cast nor in the narrower type."""
        return dtype_bytes(w.dtype) > dtype_bytes(self.layout.precision.operand_dtype)

    def _quantise(self, name: str, x: Value, w: Value, product: Value) -> None:
        """Casts activations only; weights are stored in the products' type, or wide."""
        precision = self.layout.precision
        if precision.experts_dtype and "E" in x.array.dims and "E" in w.array.dims:
            # A kernel of experts takes narrow rows[E, C, D]. Its first product narrows the second's
            # rows[E, C, M] itself (FlashInfer's trtllm_fp4_block_scale_moe).
            if "M" not in x.array.dims:
                self._cast(name, x, x, product, precision.experts_dtype, routed=True)
        elif not self.multiplies_wide(w):
            self._cast(name, x, x, product, precision.matmul_dtype)

    def read_share(self, plan: Contraction) -> Any:
        """The share of its experts' weights that the busiest device reads, with equally likely experts.

        Some token chose an expert with probability p = 1 - (1 - k/E)^tokens; see `most_of_any`. A
        product of all experts reads all weights.
        """
        moe = self.config.moe
        if "E" not in plan.einsum.lhs or moe is None:
            return 1.0
        if moe not in self._read_shares:
            tokens = self.sizes["B"] * self.sizes["T"] / self.mesh.size(self._whole_experts_axes())
            chosen = 1 - (1 - moe.experts_per_token / moe.num_experts) ** tokens
            devices = self.mesh.size(self.layout.table.axes_of("E"))
            held = max(1, round(moe.num_experts / devices))
            share, blocks = most_of_any(held, devices, chosen) / held, self.expert_rows.blocks
            self._read_shares[moe] = share + blocks.least * (1 - share) if blocks else share
        return self._read_shares[moe]

    def reads_of_weight(self, blocks: Blocks) -> Any:
        """A chosen expert's weight is read once for each block of its rows, at least once."""
        return largest((1.0, super().reads_of_weight(blocks)))

    def add_shared_experts(self, name: str, chosen: Value, shared: Value, gate: Value | None) -> Value:
        """A sum; with `Lowering.adds_shared`, the terms of chosen and shared experts share one all-reduce.

        A device then adds its partial sums of both first, if both are summed over the same axes.
        """
        if self.lowering.adds_shared:
            axes, made = _summed_axes(self._maker(chosen)), self._maker(shared)
            if axes and axes == _summed_axes(made):
                self.nodes[self.nodes.index(made)] = replace(made, forward_transfers=())
        return super().add_shared_experts(name, chosen, shared, gate)

    def _maker(self, x: Value) -> Node:
        """The node of this layer that makes x."""
        return next(node for node in self.nodes if any(out is x for out in node.outputs))

    def _whole_experts_axes(self) -> tuple[str, ...]:
        """Axes that split the tokens and not the experts, which are copied over them."""
        experts = self.layout.table.axes_of("E")
        return tuple(axis for axis in self.layout.batch_axes if axis not in experts)

    def attention(
        self, name: str, q: Value, k: Value, v: Value, at: AtLayer, scoring: Scoring[Value]
    ) -> tuple[Value, AtLayer]:
        """Attention of a pass: prefill as in training; a generate step reads each sequence's cache.

        A cache of latents[B,S,R] and rotary keys[B,S,A] is read as one KV head: queries go through wk_up and
        sums of latents through wv_up (DeepSeek-V2, 2024), with the FLOPs of the new position's keys and
        values. Scores take 2 B S N (R + A) FLOPs, and values 2 B S N R.

        Queries move to the devices of the cache, and the values' sums return. If a cache is split by sequence
        of the batch, these are two AllToAlls. If it is split by position, the queries of all heads are
        gathered, and partial sums of exponentials and values are added. Source: How to Scale Your Model,
        "Inference".
        """
        if self.is_whole:
            layout = self.layout
            made = self.config.mla is None and not at.kind.shares_kv
            if made and (uses_ring(layout) or attention_layout(layout) is not layout):
                self._all_to_keep({"k": k, "v": v})
            # In training, sinks cost the sum of their gradient; a pass of serving has none.
            without_sinks = scoring._replace(sinks=None)
            return super().attention(name, q, k, v, at, without_sinks)
        window, chosen = self._read(at.kind), scoring.chosen
        cached = self.cached(1, read_positions(self.sizes["S"], window))
        kept = tuple(value for name, value in cached.items() if not name.startswith("index"))
        out = self._like_queries(q, v)
        at_cache = _at_cache(q.array, kept[0].array)
        q = self._moved(f"to_{name}", q, at_cache)
        summed = _at_cache(out, kept[0].array).replace(unreduced=kept[0].array.axes_of("S"))
        partial = self.value(summed, q.dtype)
        if self.config.mla is None:
            made = self._attend(name, (q,), kept, partial, partial, window, chosen)
        else:
            latent, rope = (
                self.value(_at_cache(self.layout.activation("q", letters), kept[0].array), q.dtype)
                for letters in ("BTNR", "BTNA")
            )
            made = self._attend(name, (latent, rope), kept, latent, partial, window, chosen)
        if self._lanes:
            share = 1.0 if chosen is None else self._share_at_once(kept[0])
            scratch = self._copied(kept, q.dtype) * share
            # Chosen latents are written, read for the scores with the rotary keys, and again for the values.
            copies = [_numbers(value) * dtype_bytes(q.dtype) for value in kept]
            moved = 0 if chosen is None else 2 * sum(copies) + copies[0]
            self._copied_first(scratch, moved)
        return self._moved(f"from_{name}", made, out), at

    def latent_attention(
        self,
        name: str,
        q: Value,
        latent: Value,
        rope: Value,
        w: Mapping[str, Value],
        at: AtLayer,
        scoring: Scoring[Value],
    ) -> tuple[Value, AtLayer]:
        if self.is_whole and self.layout.table.position_axes:
            self._all_to_keep({"latent": latent, "rope": rope})
        return super().latent_attention(name, q, latent, rope, w, at, scoring)

    def index(
        self, name: str, q: Value, k: Value, weights: Value | None, at: AtLayer, entries: Places | None = None
    ) -> tuple[Value, AtLayer]:
        """The choice, with the gathered keys and their products with each head if no kernel reads pages."""
        if entries is not None and not self.is_whole:
            entries = None  # a step that reads the cache finds their keys in it
        made = super().index(name, q, k, weights, at, entries)
        if self._lanes:
            keys, indexer = self._index_keys(k, positions_of_entry(at.kind)), self.config.indexer
            assert indexer is not None, "only an indexer has an index"
            of_scores = dtype_bytes("f32") * self._heads_scored(q, indexer) / self.sizes["y"]
            of_key = dtype_bytes(q.dtype) + of_scores
            held = _numbers(keys) * of_key * self._share_at_once(keys)
            self._copied_first(held, 2 * _numbers(keys) * dtype_bytes(q.dtype))
        return made

    def _positions_summed(self) -> float:
        return self.sizes["S"] if self.is_whole else self.sizes["T"]

    def _copied_first(self, scratch: Any, moved: Any) -> None:
        """Add copies of pages to the last node. scratch: their bytes. moved: bytes to write and read them."""
        work, *others = self.nodes[-1].forward
        copied = replace(work, hbm_bytes=work.hbm_bytes + moved), *others
        self.nodes[-1] = replace(self.nodes[-1], forward=copied, scratch=whole(scratch))

    def _copied(self, kept: tuple[Value, ...], dtype: str) -> Any:
        """Bytes of gathered pages, without a kernel that reads them in place.

        Heads narrower than a tile are gathered with several positions in a row, and then cut out of the rows
        into tiles that they fill in part.
        """
        gathered = [_numbers(value) * dtype_bytes(dtype) for value in kept]
        widths = (self.sizes[value.array.dims[-1]] for value in kept)
        cut = (
            num_bytes * (1 + self._lanes / width) * (width < self._lanes)
            for num_bytes, width in zip(gathered, widths, strict=True)
        )
        return larger(sum(gathered), largest(cut))

    def _share_at_once(self, kept: Value) -> Any:
        """The share of a device's chosen positions, or keys of an index, that are gathered at a time."""
        positions = _numbers(kept) / self.sizes[kept.array.dims[-1]]
        return smaller(1.0, KEYS_AT_ONCE / positions)

    def join_rope(self, name: str, k: Value, rope: Value) -> Value:
        """Record the join for whole prompts only: generation absorbs wk_up and builds no keys."""
        if self.is_whole:
            return super().join_rope(name, k, rope)
        return self.value(self.layout.activation(name, "BTNH"), k.dtype)

    def _index_keys(self, k: Value, every: int) -> Value:
        if self.is_whole:
            return super()._index_keys(k, every)
        return self.cached(1, self.sizes["S"] // every)["index"]

    def _keys_scored(self, keys: Value) -> Any:
        """Keys of whole pages, if they are chosen from pages.

        Programs that read page by page score TOGETHER pages at a time.
        """
        if not self._reads_chosen:
            return super()._keys_scored(keys)
        pages = self._pages_read(None)
        count = min(TOGETHER, -(-self.sizes["S"] // self._page)) if self.form == "pages" else 1
        return self._page * count * sum(-(-number // count) for number in pages) / len(pages)

    def _all_to_keep(self, kept: Mapping[str, Value]) -> None:
        """Gathers a prompt's positions, since the cache of a sequence has all of them."""
        for name, x in kept.items():
            gather = gathered_keys(self.layout, name, "".join(x.array.dims))
            self.reshard(name, "move", x, gather, x.dtype, critical=False, what="keys and values")

    @property
    def is_whole(self) -> bool:
        """Whether attention is over whole prompts and reads no cache; latents in pages are read from it."""
        has_pages_of_latents = self.form == "pages" and self.config.mla is not None
        return self.sizes["T"] == self.sizes["S"] and not has_pages_of_latents

    @property
    def _reads_chosen(self) -> bool:
        """Whether the chosen keys are gathered from pages."""
        return self.form in ("pages", "tables") and self.config.indexer is not None

    def _keys_multiplied(self, k: Value, window: Window | None) -> Any:
        if window and window.compressed and self.form in ("pages", "tables"):
            # Each query gathers a whole window and its entries, also the keys that are masked.
            return window.size + window.read_entries(self.sizes["S"])
        if self._reads_chosen and self.config.indexer:
            return min(self.config.indexer.top_k, self.sizes["S"])
        if self.form == "tables":
            return self.sizes["S"]
        if self._lanes and window and not window.compressed:
            size = self._page * self.mesh.size(k.array.axes_of("S"))
            return smaller(size * most_pages(window, self.sizes["T"], size), self.sizes["S"])
        if self.form != "pages":
            return super()._keys_multiplied(k, window)
        pages = self._pages_read(window)
        return self._page * sum(pages) / len(pages)

    @property
    def _row(self) -> int:
        """Queries of a row."""
        return min(self._rows, self.sizes["T"])

    def _pages_read(self, window: Window | None) -> tuple[int, ...]:
        return pages_read(self.sizes["T"], self.sizes["S"], self._row, self._page, window)

    def _softmax(
        self, q: Value, kept: tuple[Value, ...], summed: Value, keys: Numeric, window: Window | None
    ) -> tuple[Value, ...]:
        """The scores in memory: of one row and some pages at a time, or of all rows and a block of tables.

        Each score is written, read for the maximum and for its exponential (float32), and its weight is
        written and read: on CPUs in float32, otherwise in the type of activations. Page by page, the float32
        sums of values are read and written with each page, or with some pages by a long row's product. Each
        row gathers a separate table, which is read, written and read; blocks of it add to the sums of values.
        """
        if self.form not in ("pages", "tables"):
            return super()._softmax(q, kept, summed, keys, window)
        f32, out = dtype_bytes("f32"), self.elements(summed.array)
        of_queries = self.elements(q.array) / self.sizes[q.array.dims[-1]]
        scores = of_queries * keys
        if self.form == "pages":
            some = SIDE_BY_SIDE if self.sizes["S"] >= 2 * TOGETHER * self._page else 1
            queries = self.sizes["T"] * self.sizes["B"] / self.mesh.size(q.array.axes_of("B"))
            held = of_queries / queries * self._row * some * self._page * 2 * f32 + f32 * out
            traffic = 5 * f32 * scores + 2 * f32 * out * keys / (some * self._page)
        else:
            narrow = dtype_bytes(self.layout.precision.compute_dtype)
            tables = sum(one.bytes_per_device for one in self.cached(1, self.sizes["S"]).values())
            tables = tables * -(-self.sizes["T"] // self._row)
            num_blocks = max(1.0, self.sizes["S"] / (TOGETHER * self._page))
            held = (scores * (f32 + narrow) + tables) / num_blocks + f32 * out
            traffic = scores * (3 * f32 + 2 * narrow) + 3 * tables + 2 * f32 * out * (num_blocks - 1)
        value = Value(q.array.replace(name="scores"), "f32", whole(held))
        work = (Work(hbm_bytes=traffic),)
        return (self.add(Node("softmax", "softmax", (q, kept[0]), (value,), (q,), work, work)),)

    def _moved(self, name: str, x: Value, target: ShardedArray) -> Value:
        """`x` in the sharding of attention, or its sums in the sharding of the next product."""
        steps = reshard(x.array, target.replace(name=x.array.name))
        moves = self.transfers("activations", steps, name, x.dtype, critical=True)
        if not moves:
            return x
        return self.add(Node(name, "move", (x,), (self.value(target, x.dtype),), forward_transfers=moves))

    def cached(
        self, num_layers: int, positions: int | Mapping[str, int], variant: int = 0
    ) -> dict[str, Value]:
        """The arrays of `positions` in the cache of `num_layers` layers of a variant, then their scales.

        positions: one number, or a number for each array.
        """
        sizes, dtype = self.sizes, self.layout.precision.cache_dtype
        config = self.config.at(variant)
        of_layers = dimensions(config) if variant else {}
        scaled, arrays, scales = cache_scales(config, dtype), {}, {}
        for name, letters in cache_arrays(config).items():
            count = positions[name] if isinstance(positions, Mapping) else positions
            self.sizes = {**sizes, **of_layers, "L": num_layers, "S": count}
            array = self._kept_as.activation(name, "L" + letters)
            arrays[name] = self.value(array, dtype)
            if name in scaled:
                of_scales = ShardedArray(array.name, array.dims[:-1], array.axes[:-1])
                scales[f"{name}_scales"] = self.value(of_scales, "f32")
        self.sizes = sizes
        return arrays | scales


def _summed_axes(node: Node) -> set[str]:
    """The mesh axes of the all-reduce of a node's result; empty if it has any other transfer."""
    sent = node.forward_transfers
    is_only = all(transfer.op == "all_reduce" for transfer in sent)
    return {axis for transfer in sent for axis in transfer.axes} if is_only else set()


def _numbers(value: Value) -> Any:
    """Numbers of an array on one device, also of an array of fewer layers than the model has."""
    return value.bytes_per_device / dtype_bytes(value.dtype)


def most_of_any(held: int, devices: int, chosen: Numeric) -> Any:
    """The expected number of chosen experts on the device with the most.

    Each of `devices` has `held` experts, each chosen with probability `chosen`:

        sum over j < held of 1 - P(at most j of held)^devices

    >>> round(most_of_any(4, 1, 0.5), 3), round(most_of_any(4, 64, 1 / 32), 2)
    (2.0, 1.31)
    """
    at_most, most = 0.0, 0.0
    for count in range(held):
        at_most = at_most + comb(held, count) * chosen**count * (1 - chosen) ** (held - count)
        most = most + 1 - at_most**devices
    return most


def _at_cache(queries: ShardedArray, cache: ShardedArray) -> ShardedArray:
    """queries[B, T, N, ...] on the devices of the cache that they read, split by B as the cache.

    Heads stay split over the axes that do not split the cache's sequences or positions.
    """
    taken = {*cache.axes_of("B"), *cache.axes_of("S")}
    heads = tuple(axis for axis in queries.axes_of("N") if axis not in taken)
    return queries.replace(axes={"B": cache.axes_of("B"), "N": heads})
