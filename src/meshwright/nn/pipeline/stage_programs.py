"""The passes of a pipeline whose stages run programs of their own, one chunk of layers at a time.

A chunk is of consecutive layers; the first has the embedding, the last the head. Its programs run on the
devices of one stage only, whose layout is without `pipe`: other axes split layers as without a pipeline.

    forward          x[B, T, D] -> y[B, T, D], and the residuals that the remat policy selects. The last
                     chunk returns the loss and its cotangent instead of y: no logits outlive the program
    backward         dy -> dx, and the gradients of the chunk's weights are added to the totals
    input_gradient   dy -> dx, and the operands of the gradients of the products' weights
    weight_gradient  operands -> the gradients of the products' weights

A token, the number 1, parts the two gradients of a product x W. The backward pass is traced with
dW = (token x)^T dy: linear in the token, so that `jax.linearize` leaves dW for later, with operands x and dy.
All other gradients are part of input_gradient: of norms, biases, experts, narrow products and both ends.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from meshwright.layout import Layout
from meshwright.layout.pipelines.depths import layers_of_depths
from meshwright.models import transformer
from meshwright.models.at_layer import Places
from meshwright.models.config import ModelConfig
from meshwright.models.layer_kinds import Layer, Stack, base_stack
from meshwright.models.parameters import ENTERING, STACK_LETTERS
from meshwright.nn.gradients import added, as_used, differentiated, zeros
from meshwright.nn.ops.jax_ops import JaxOps
from meshwright.nn.params import flatten
from meshwright.nn.pipeline.spmd_1f1b import FORWARD

# Rows of a step on a stage; None on a stage that reads none.
Rows = Array | None
# (tokens[B, T], targets[B, T], places) from the rows of a step and the microbatch's number.
Microbatch = Callable[[Rows, Array], tuple[Array, Array, Places]]
STACKS: tuple[Stack, ...] = tuple(STACK_LETTERS)
TOKEN = np.float32(1)
Totals = dict[str, Array]
# By depth of the parameter's chunk, and path: chunks of one stage that read a parameter share its entry.
StageTotals = dict[tuple[int, str], Array]
LOSS, ROUTERS = "loss", "router_losses"


@dataclass(frozen=True)
class Chunk:
    """A part of the model: consecutive layers, numbered within it, and the embedding or head at an end.

    rows: by stack, the chunk's own rows of it. depth: position of the chunk in the model.
    """

    layers: tuple[Layer, ...]
    rows: Mapping[Stack, slice]
    depth: int
    is_last: bool

    @classmethod
    def of_depths(cls, config: ModelConfig, layout: Layout) -> list["Chunk"]:
        """The chunk of every depth."""
        schedule, programs = layout.schedule, []
        depths = layers_of_depths(config.num_layers, schedule.pipeline, layout.pipe, schedule.interleave)
        for depth, numbers in enumerate(depths):
            layers = [config.layers[number] for number in numbers]
            rows_of_stacks: dict[Stack, list[int]] = {}
            for layer in layers:
                rows_of_stacks.setdefault(layer.kind.stack, []).append(layer.row)
            rows = {stack: slice(some[0], some[-1] + 1) for stack, some in rows_of_stacks.items()}
            renumbered = (layer._replace(row=layer.row - rows[layer.kind.stack].start) for layer in layers)
            programs.append(cls(tuple(renumbered), rows, depth, depth == len(depths) - 1))
        return programs

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.depth == 0

    def has(self, path: str) -> bool:
        """Whether the chunk has the parameter of this path, or rows of it."""
        stack, _, _ = path.rpartition("/")
        return stack in self.rows if stack else (self.is_first if path in ENTERING else self.is_last)

    def reads_tokens(self, config: ModelConfig) -> bool:
        """Whether a layer looks up the experts of each token in a table."""
        of_layers = (config.at(layer.kind.variant).moe for layer in self.layers)
        return any(moe is not None and moe.hashed for moe in of_layers)

    def home(self, path: str) -> int:
        """The depth of the chunk that has a parameter read here: the first chunk has a tied table."""
        return self.depth if self.has(path) else 0

    def part(self, path: str, whole: Any) -> Any:
        """This chunk's part of a whole array: of a parameter, or of an optimizer's moment.

        A moment of a stack that the optimizer replaces by another array has the shape (1,), and is returned
        whole.
        """
        if whole.shape == (1,):
            return whole
        rows = self.rows.get(_stack_of(path) or "")
        return whole if rows is None else whole[rows]

    def num_rows(self, stack: str) -> int:
        """How many layers of a stack are its own."""
        return next((rows.stop - rows.start for own, rows in self.rows.items() if own == stack), 0)


def is_stacked(path: str) -> bool:
    """Whether a parameter, or an optimizer's moment of it, is stacked over layers.

    >>> is_stacked("layers/wq"), is_stacked("opt_state.mu.layers.wq"), is_stacked("opt_state.mu.embed")
    (True, True, False)
    """
    return _stack_of(path) is not None


def _stack_of(path: str) -> Stack | None:
    """The stack of a parameter, or of an optimizer's moment of it; None if it is not stacked.

    >>> _stack_of("layers.2/wq"), _stack_of("opt_state.mu.layers.2.wq"), _stack_of("opt_state.mu.layers.wq")
    ('layers.2', 'layers.2', 'layers')
    """
    names = path.replace("/", ".").split(".")
    for name, after in zip(names, (*names[1:], ""), strict=True):
        if name in STACKS:
            return f"{name}.{after}" if after.isdigit() else name
    return None


def stacks_of(weights: Mapping[str, Any]) -> list[str]:
    """The names of stacks among the weights."""
    return [name for name in weights if base_stack(name) in STACKS]


@dataclass(frozen=True)
class Recipe:
    """How to rebuild a pytree from arrays that are available (`known`) and arrays that were kept.

    places: for every leaf, its index among the known arrays followed by the kept arrays.
    """

    structure: Any
    places: tuple[int, ...]

    @classmethod
    def of(cls, tree: object, known: object) -> tuple["Recipe", list[Array]]:
        """The recipe of a pytree, and the arrays to keep: each once, without the known arrays."""
        leaves, structure = jax.tree.flatten(tree)
        ids = list(map(id, jax.tree.leaves(known)))
        kept = {id(leaf): leaf for leaf in leaves if id(leaf) not in ids}
        numbers = {own: number for number, own in enumerate((*ids, *kept))}
        return cls(structure, tuple(numbers[id(leaf)] for leaf in leaves)), list(kept.values())

    def made(self, known: object, kept: Sequence[Array]) -> Any:
        """The pytree."""
        leaves = [*jax.tree.leaves(known), *kept]
        return jax.tree.unflatten(self.structure, [leaves[place] for place in self.places])


class ChunkPrograms:
    """A stage's computations of one chunk; methods are traced under the stage's mesh, `forward` first.

    layout: of a stage. share: weight of a microbatch's loss in the loss of its step, given the rows.
    router_weights: see `SpmdPipeline`. weights: the pytree of the chunk's parameters. totals: sums over the
    microbatches so far, by path; every program adds to some.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        ops: JaxOps,
        chunk: Chunk,
        batch: Microbatch,
        share: Callable[[Array], Any],
        router_weights: Any = None,
    ) -> None:
        self.config, self.layout, self.ops = config, layout, ops
        self.chunk, self.layers = chunk, chunk.layers
        self.is_first, self.is_last = chunk.is_first, chunk.is_last
        self.batch, self.share, self.router_weights = batch, share, router_weights
        # Known once a program is traced: the totals; of the backward pass, and of gradients left for later.
        self._summed: tuple[str, ...] = ()
        self._saved: Recipe | None = None
        self._left: Recipe | None = None
        self._read_later: tuple[int, ...] = ()

    def nothing_yet(self, weights: Mapping[str, Any]) -> Totals:
        """The totals of no microbatch."""
        gradients = zeros(self.config, self.layout, differentiated(self.config, self.layout, weights))
        losses = {LOSS: jnp.zeros(())} | ({ROUTERS: jnp.zeros(2)} if self.ops.router_losses else {})
        metrics = flatten(gradients) | losses
        self._summed = tuple(metrics)
        return metrics

    def by_home(self, totals: Totals) -> StageTotals:
        """The chunk's totals keyed by (depth of the parameter's chunk, path), as its stage stores them."""
        return {(self.chunk.home(path), path): total for path, total in totals.items()}

    def adds_to(self, program: str) -> list[tuple[int, str]]:
        """The stage's totals that a program adds to; parted gradients are known once `forward` is traced."""
        of_layers = [path for path in self._summed if path.startswith(STACKS)]
        losses = [path for path in self._summed if path in (LOSS, ROUTERS)]
        of_ends = [path for path in self._summed if path not in (*of_layers, *losses)]
        parted = [path for path in of_layers if path.rpartition("/")[2] in self.ops.parted]
        unparted = [path for path in of_layers if path not in parted]
        added_to = {
            "forward": [*losses, *(of_ends if self.is_last else [])],
            "backward": [*of_layers, *(of_ends if self.is_first else [])],
            "input_gradient": [*unparted, *(of_ends if self.is_first else [])],
            "weight_gradient": parted,
        }
        return [(self.chunk.home(path), path) for path in added_to[program]]

    # Programs

    def forward(
        self,
        totals: Totals,
        weights: Mapping[str, Any],
        x: Array | None,
        rows: Rows,
        index: Array,
        token: Array | None,
    ) -> tuple[Totals, Array, list[Array]]:
        """(totals, y or, for the last chunk, its cotangent, residuals)."""
        _, targets, places = self._read(rows, index)
        stacks, leaves = self._parts(weights, stacks_of(weights))
        x = self._entered(self.ops, self._ends(weights)[0], x, rows, index)

        def run(leaves: Mapping[str, Any], x: Array) -> tuple[Array, Any]:
            ops, used = self.ops.parting(token), as_used(self.config, self.layout, stacks, leaves)
            with jax.named_scope(FORWARD):
                return transformer.through(self.config, ops, used, x, places, None, self.layers)

        (y, of_routers), vjp = jax.vjp(run, leaves, x)
        # The same arrays as `run` reads: copies of weights would be kept with every microbatch.
        self._saved, saved = Recipe.of(vjp, (token, (stacks, leaves), places))
        if of_routers is not None:
            totals = totals | {ROUTERS: totals[ROUTERS] + of_routers / self.layout.schedule.microbatches}
        if not self.is_last:
            return totals, y, saved

        def head(leaves: Mapping[str, Any], y: Array) -> Array:
            ends = self._ends(weights, leaves)[0]
            return self._left_with_loss(self.ops, ends, y, targets, rows)

        loss, (d_ends, d_y) = jax.value_and_grad(head, argnums=(0, 1))(self._ends(weights)[1], y)
        more = flatten(d_ends)
        sums = added({path: totals[path] for path in more}, more)
        return totals | sums | {LOSS: totals[LOSS] + loss}, d_y, saved

    def backward(
        self,
        totals: Totals,
        weights: Mapping[str, Any],
        saved: Sequence[Array],
        d_y: Array,
        rows: Rows,
        index: Array,
        token: Array | None,
    ) -> tuple[Totals, Array]:
        """(totals, dx)."""
        d_stacks, d_x = self._pulled_back(weights, saved, d_y, rows, index, token)
        return added(totals, flatten(d_stacks) | self._d_entered(weights, d_x, rows, index)), d_x

    def input_gradient(
        self,
        totals: Totals,
        weights: Mapping[str, Any],
        saved: Sequence[Array],
        d_y: Array,
        rows: Rows,
        index: Array,
        token: Array,
    ) -> tuple[Totals, Array, list[Array]]:
        """(totals, dx, operands of the products' gradients)."""

        def of_token(token: Array) -> tuple[Any, Any]:
            d_stacks, d_x = self._pulled_back(weights, saved, d_y, rows, index, token)
            flat = flatten(d_stacks)
            later = {path: flat.pop(path) for path in list(flat) if path not in totals}
            return later, (flat, d_x)

        _, later, (now, d_x) = jax.linearize(of_token, token, has_aux=True)
        recipe, left = Recipe.of(later, saved)
        self._read_later = tuple(number for number in range(len(saved)) if number in recipe.places)
        self._left, _ = Recipe.of(later, ([saved[number] for number in self._read_later], left))
        return added(totals, now | self._d_entered(weights, d_x, rows, index)), d_x, left

    def for_later(self, saved: Sequence[Array], left: Sequence[Array]) -> list[Array]:
        """The arrays that `weight_gradient` reads: some of `saved`, and all that `input_gradient` left."""
        return [*(saved[number] for number in self._read_later), *left]

    def weight_gradient(self, totals: Totals, left: Sequence[Array]) -> tuple[Totals]:
        """The totals with the gradients that `input_gradient` left for later."""
        assert self._left is not None, "input_gradient is traced first"
        return (added(totals, self._left.made(left, ())(jnp.ones_like(TOKEN))),)

    def loss(self, weights: Mapping[str, Any], x: Array | None, rows: Rows, index: Array) -> Array:
        """y, or for the last chunk the microbatch's share of the loss, as in validation."""
        _, targets, places = self._read(rows, index)
        ops = self.ops.of_validation()
        entered = self._entered(ops, self._ends(weights)[0], x, rows, index)
        stacks, leaves = self._parts(weights, stacks_of(weights))
        used = as_used(self.config, self.layout, stacks, leaves)
        y, _ = transformer.through(self.config, ops, used, entered, places, None, self.layers)
        if not self.is_last:
            return y
        return self._left_with_loss(ops, self._ends(weights)[0], y, targets, rows)

    # Shared by the programs

    def _read(self, rows: Rows, index: Array) -> tuple[Array, Array, Places]:
        """Tokens, targets and places of a microbatch; places have the tokens too if a layer reads them."""
        tokens, targets, places = self.batch(rows, index)
        return tokens, targets, transformer.with_tokens(self.config, places, tokens)

    def _pulled_back(
        self,
        weights: Mapping[str, Any],
        saved: Sequence[Array],
        d_y: Array,
        rows: Rows,
        index: Array,
        token: Array | None,
    ) -> tuple[Any, Array]:
        """(gradients of the layers' weights, dx)."""
        assert self._saved is not None, "forward is traced first"
        _, _, places = self._read(rows, index)
        vjp = self._saved.made((token, self._parts(weights, stacks_of(weights)), places), saved)
        d_routers = self.router_weights
        if d_routers is not None:
            d_routers = jnp.asarray(d_routers) / self.layout.schedule.microbatches
        return vjp((d_y, d_routers))

    def _entered(
        self, ops: JaxOps, ends: Mapping[str, Any], x: Array | None, rows: Rows, index: Array
    ) -> Array:
        if not self.is_first:
            assert x is not None, "the chunk before sends its result"
            return x
        tokens, _, places = self._read(rows, index)
        with jax.named_scope(FORWARD):
            return transformer.enter(self.config, ops, ops.reads(ends), tokens, places)

    def _d_entered(self, weights: Mapping[str, Any], d_x: Array, rows: Rows, index: Array) -> Totals:
        """The gradients of the embedding's weights on the first chunk; no gradients on others."""
        if not self.is_first:
            return {}

        def enter(leaves: Mapping[str, Any]) -> Any:
            return self._entered(self.ops, self._ends(weights, leaves)[0], None, rows, index)

        (d_ends,) = jax.vjp(enter, self._ends(weights)[1])[1](d_x)
        return flatten(d_ends)

    def _left_with_loss(
        self, ops: JaxOps, ends: Mapping[str, Any], y: Array, targets: Array, rows: Rows
    ) -> Array:
        """The microbatch's share of the loss."""
        assert rows is not None, "the last chunk reads targets"
        return transformer.leave_with_loss(self.config, ops, ops.reads(ends), y, targets) * self.share(rows)

    def _ends(self, weights: Any, leaves: Any = None) -> tuple[Any, Any]:
        """The weights of the embedding or the head as they are used, and the arrays to differentiate."""
        shared, fresh = self._parts(weights, [name for name in weights if base_stack(name) not in STACKS])
        leaves = fresh if leaves is None else leaves
        return as_used(self.config, self.layout, shared, leaves), leaves

    def _parts(self, weights: Mapping[str, Any], names: Sequence[str]) -> tuple[Any, Any]:
        """The weights of some names, and the arrays to differentiate for them."""
        parts = {name: weights[name] for name in names if name in weights}
        return parts, differentiated(self.config, self.layout, parts)
