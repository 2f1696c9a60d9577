"""Contractions and reshards on devices, every step as the algebra derives it.

Explicit sharding: an array's type is its notation, so each collective is one `reshard` to the type
of its result (for a reduce-scatter see also scatter.py), and a partial sum stays partial
until a step finishes it. Backward, the cotangent of a resharded array is resharded back. An array
that several devices use is typed `reduced` over their axes, which makes its cotangent a partial sum:
all its uses share the one reduction.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import reshard
from jax.typing import DTypeLike

from meshwright.nn.products.contract import local_product
from meshwright.nn.products.exchange import exchange, is_exchange
from meshwright.nn.products.scatter import reduce_scatter
from meshwright.nn.start.device_mesh import named_here, partition_spec, reduced_axes
from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.collective import Collective
from meshwright.notation.collective import reshard as reshard_steps
from meshwright.notation.einsum import Contraction, Reshard, cotangent


def contract(plan: Contraction, dtype: DTypeLike, lhs: Array, rhs: Array) -> Array:
    """`plan.out` of operands sharded as `plan.lhs` and `plan.rhs`. Call under `jax.set_mesh`."""
    lhs, rhs = apply_reshard(plan.lhs_reshard, lhs), apply_reshard(plan.rhs_reshard, rhs)
    return apply_reshard(plan.out_reshard, local_product(plan, dtype, lhs, rhs))


class SentIn(NamedTuple):
    """The types in which an array and its cotangent travel, if they differ from the array's own type."""

    forward: Any
    backward: Any

    @property
    def wider(self) -> Any:
        """The type of the result, which represents a cotangent in either type."""
        return jnp.promote_types(self.forward, self.backward)


def apply_reshard(
    reshard: Reshard, x: Array, sent_in: SentIn | None = None, *, is_named: bool = False
) -> Array:
    """`x`, sharded as `reshard.given`, as `reshard.used`; its cotangent comes from `reshard.yielded`.

    If `x` is typed `reduced`, its cotangent stays a partial sum over the same axes. sent_in: the result is
    rounded to its `forward`, and has the wider of both types. is_named: `x` is `named_here`, once for
    several reshards (`named_once`).
    """
    if reshard.given.same_layout(reshard.used) and not reshard.yielded.unreduced:
        return x
    kept = reduced_axes(jax.typeof(x).sharding.spec)
    home = cotangent(reshard.given).replace(unreduced=kept)
    steps_home = reshard_steps(reshard.yielded, home) if kept else reshard.backward

    @jax.custom_vjp
    def moved(x: Array) -> Array:
        if sent_in:
            x = x.astype(sent_in.forward)
        here = x if is_named else named_here(x)
        used = _run_to(here, reshard.forward, reshard.used, reshard.yielded.unreduced)
        return used.astype(sent_in.wider) if sent_in else used

    def backward(_: None, d_used: Array) -> tuple[Array]:
        if sent_in:
            d_used = d_used.astype(sent_in.backward)
        return (run_to(d_used, steps_home, home, reshard.given.unreduced).astype(x.dtype),)

    moved.defvjp(lambda x: (moved(x), None), backward)
    return moved(x)


@jax.custom_vjp
def named_once(x: Array) -> Array:
    """`x`, `named_here` for several reshards, so that XLA merges the equal ones."""
    return named_here(x)


named_once.defvjp(lambda x: (named_once(x), None), lambda _, d_x: (d_x,))


def run_steps(x: Array, steps: Sequence[Collective]) -> Array:
    """`x` after `steps`, each a reshard to its result, or one exchange in place of several."""
    return _run(named_here(x), steps) if steps else x


def _run(x: Array, steps: Sequence[Collective]) -> Array:
    for step in steps:
        x = _run_step(x, step)
    return x


def _run_step(x: Array, step: Collective) -> Array:
    if step.op in ("all_gather", "reduce_scatter", "all_to_all") and is_exchange(step):
        return exchange(x, step)
    if step.op == "reduce_scatter":
        return reduce_scatter(x, step)
    return reshard(x, partition_spec(step.result))


def run_to(x: Array, steps: Sequence[Collective], end: ShardedArray, reduced: Axes) -> Array:
    """`x` after `steps`, which lead to `end`; over `reduced` its cotangent will be a partial sum."""
    return _run_to(named_here(x), steps, end, reduced)


def _run_to(x: Array, steps: Sequence[Collective], end: ShardedArray, reduced: Axes) -> Array:
    if not reduced:
        return _run(x, steps)
    return reshard(_run(x, steps[:-1]), partition_spec(end, reduced))
