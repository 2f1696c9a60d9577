"""The model on its devices, with a cache of `num_slots` sequences: what the engine runs.

    cache      {"k", "v"}: [L, B, S, K_tensor, H], B slots of S = context positions
    prefill    one prompt, padded at its end to one of a few lengths, into its slot of the cache
    generate   one token for every slot at once

Every program is compiled ahead for its exact shapes, and a compiled program takes no others, so no
request ever waits for the compiler. What stands in the cache beyond a slot's position (padding, an
earlier sequence) is never seen: a query sees only the keys up to its own position, and each of those
was written by its own sequence.
"""

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec, reshard

from meshwright.errors import LayoutError, PlanError
from meshwright.layout import DEGREES, Layout
from meshwright.models.config import ModelConfig
from meshwright.models.transformer import Places
from meshwright.models.transformer import logits as forward
from meshwright.nn.attention import abstract_cache
from meshwright.nn.ops import JaxOps
from meshwright.nn.params import abstract_params
from meshwright.serve.scoring import Scores, score

Cache = dict[str, Array]

# Below this a shorter prefill saves nothing: its time is that of reading the weights.
_SHORTEST_PREFILL = 16


class JaxRunner:
    """The engine's Runner: `num_slots` sequences of up to `context` tokens each.

    params: on `mesh` as the layout stores them, from `load_hf` or a checkpoint. The layout splits
    over `tensor` alone. Call `warm_up` before use. Raises LayoutError where the layout does not fit
    the model or serving, PlanError where the context is longer than the model's or there is no slot.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        config: ModelConfig,
        layout: Layout,
        mesh: Mesh,
        *,
        num_slots: int,
        context: int,
    ) -> None:
        _check(config, layout, num_slots, context)
        self.num_slots, self.context, self.vocab_size = num_slots, context, config.vocab_size
        self._params, self._mesh = params, mesh
        self._config, self._layout, self._ops = config, layout, JaxOps(config, layout)
        self._prefill_programs: dict[int, Any] = {}
        self._generate_program: Any = None
        self._cache: Cache = {}
        self._score_programs: dict[int, Any] = {}
        self._scoring = threading.Lock()

    def warm_up(self) -> None:
        """Compile the programs, one a prefill length and one to generate, and make the cache."""
        params = abstract_params(self._config, self._layout, self._mesh)
        cache = self._abstract_cache(self.num_slots, self.context)
        with jax.set_mesh(self._mesh):
            self._prefill_programs = {
                length: _compile(self._prefill_step, params, cache, _int32(length), _int32(), _int32())
                for length in prefill_lengths(self.context)
            }
            slots = _int32(self.num_slots)
            self._generate_program = _compile(self._generate_step, params, cache, slots, slots)
            self._cache = jax.jit(lambda: jax.tree.map(_zeros, cache))()

    def prefill(self, slot: int, tokens: list[int]) -> Array:
        """Logits f32[V] after `tokens`, whose keys and values now fill positions 0.. of `slot`."""
        assert self._cache, "warm_up() comes first"
        assert 0 <= slot < self.num_slots and 0 < len(tokens) <= self.context
        length = next(length for length in self._prefill_programs if length >= len(tokens))
        padded = np.zeros(length, np.int32)
        padded[: len(tokens)] = tokens
        return self._run(self._prefill_programs[length], padded, np.int32(len(tokens)), np.int32(slot))

    def generate(self, tokens: np.ndarray, positions: np.ndarray) -> Array:
        """Logits f32[num_slots, V] after each slot's token int32 at its position int32."""
        assert self._cache, "warm_up() comes first"
        return self._run(self._generate_program, tokens, positions)

    def prepare_scores(self, num_tokens: int) -> None:
        """Compile what scores prompts of so many tokens; called from any thread."""
        self._score_program(self._padded_length(num_tokens))

    def scores(self, tokens: list[int]) -> Scores:
        """Log-probabilities of `tokens` but the first, each given those before it."""
        length = self._padded_length(len(tokens))
        padded = np.zeros((1, length), np.int32)
        padded[0, : len(tokens)] = tokens
        found = jax.device_get(self._score_program(length)(self._params, padded))
        return Scores(*(column[: len(tokens) - 1] for column in found))

    def _padded_length(self, num_tokens: int) -> int:
        return next(length for length in prefill_lengths(self.context) if length >= num_tokens)

    def _score_program(self, length: int) -> Any:
        """The compiled program for prompts of up to `length` tokens; few servers ever need one."""
        with self._scoring:
            if length not in self._score_programs:
                params = abstract_params(self._config, self._layout, self._mesh)
                step = partial(score, self._config, self._ops, whole=_whole)
                with jax.set_mesh(self._mesh):
                    self._score_programs[length] = jax.jit(step).lower(params, _int32(1, length)).compile()
            return self._score_programs[length]

    def _run(self, program: Any, *arguments: np.ndarray | np.int32) -> Array:
        """The program's logits on the first device, where they are sampled; it updates the cache."""
        logits, self._cache = program(self._params, self._cache, *arguments)
        if self._mesh.devices.flat[0].platform == "cpu":
            # XLA's collectives on CPU (jaxlib 0.10.2) hold threads of one pool while they wait for each
            # other, so programs dispatched behind one another can starve it; see train/loop.py.
            jax.block_until_ready((logits, self._cache))
        return logits.addressable_data(0)

    def _prefill_step(
        self, params: Any, cache: Cache, tokens: Array, length: Array, slot: Array
    ) -> tuple[Array, Cache]:
        row = jax.tree.map(_zeros, self._abstract_cache(1, tokens.shape[0]))
        positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
        last = (length - 1)[None, None]
        logits, row = forward(self._config, self._ops, params, tokens[None], Places(positions), row, last)
        return _whole(logits)[0, 0], jax.tree.map(lambda all_, one: _insert(all_, one, slot), cache, row)

    def _generate_step(
        self, params: Any, cache: Cache, tokens: Array, positions: Array
    ) -> tuple[Array, Cache]:
        places = Places(positions[:, None])
        logits, cache = forward(self._config, self._ops, params, tokens[:, None], places, cache)
        return _whole(logits)[:, 0], cache

    def _abstract_cache(self, num_slots: int, context: int) -> dict[str, jax.ShapeDtypeStruct]:
        return abstract_cache(self._config, self._layout, self._mesh, num_slots, context)


def prefill_lengths(context: int) -> list[int]:
    """The lengths that prompts are padded to: powers of two below the context, and the context.

    >>> prefill_lengths(100), prefill_lengths(8)
    ([16, 32, 64, 100], [8])
    """
    lengths = [_SHORTEST_PREFILL]
    while lengths[-1] < context:
        lengths.append(2 * lengths[-1])
    return [*lengths[:-1], context]


def _check(config: ModelConfig, layout: Layout, num_slots: int, context: int) -> None:
    split = [axis for axis in DEGREES if axis != "tensor" and layout.degree(axis) > 1]
    others = [f"{axis} = {layout.degree(axis)}" for axis in split]
    if layout.word("sequence_parallel"):
        others.append("sequence_parallel")
    if others:
        raise LayoutError(f"layout {layout}: serving splits over tensor alone; leave out {', '.join(others)}")
    layout.check(config)
    if num_slots < 1:
        raise PlanError(f"{config.name}: {num_slots} slots can serve no request; fits: 1 or more")
    if context > config.max_seq_len:
        raise PlanError(
            f"{config.name}: a context of {context} tokens is longer than the model's {config.max_seq_len}; "
            f"fits: up to {config.max_seq_len}"
        )


def _compile(step: Any, *arguments: Any) -> Any:
    """`step` compiled for these shapes alone; it updates its second argument, the cache, in place."""
    return jax.jit(step, donate_argnums=1).lower(*arguments).compile()


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _zeros(leaf: jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros(leaf.shape, leaf.dtype, out_sharding=leaf.sharding)


def _insert(cache: Array, row: Array, slot: Array) -> Array:
    """cache[L, B, S, K, H] with row[L, 1, T, K, H] as the first positions of `slot`."""
    return lax.dynamic_update_slice(cache, row, (0, slot, *[0] * (cache.ndim - 2)))


def _whole(logits: Array) -> Array:
    """Float32 logits gathered over `tensor`: sampling compares the whole vocabulary."""
    return reshard(logits.astype(jnp.float32), PartitionSpec())
