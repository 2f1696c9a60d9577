"""Weights in panels: the layout that the C++ kernels for CPUs read (native/kernels.cc)."""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.native import kernels
from meshwright.nn.each_device import each_device, spec_of


@partial(jax.tree_util.register_dataclass, data_fields=["numbers"], meta_fields=[])
@dataclass(frozen=True)
class Panels:
    """A weight w[O..., I...] in the order that `kernels.product` reads, on each device.

    numbers: an array of the weight's shape, type and sharding.
    """

    numbers: Any

    @property
    def ndim(self) -> int:
        return self.numbers.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    @property
    def dtype(self) -> Any:
        return self.numbers.dtype


def in_panels(w: Array, num_summed: int) -> Panels:
    """w[O..., I...] in panels. num_summed: number of last dimensions that products sum over."""

    def local(w: Array) -> Array:
        flat = jnp.reshape(w, (prod(w.shape[: w.ndim - num_summed]), -1))
        return jnp.reshape(kernels.panel_order(flat), w.shape)

    return Panels(each_device(local, (spec_of(w),), spec_of(w))(w))
