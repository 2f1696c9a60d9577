"""The planned move of weights as a program: equal arrays, under the other layout's shardings."""

import jax
import numpy as np
import pytest

from meshwright.hardware import catalog
from meshwright.layout import Layout
from meshwright.models.presets import load_model
from meshwright.nn.params import abstract_params, flatten, init_params
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.reinforcement.weights_mover import WeightsMover

MODEL, MACHINE = load_model("tiny"), catalog.load("cpu:8")


@pytest.mark.parametrize(
    ("before", "after"),
    [("fsdp=8", "data=2,tensor=4"), ("data=2,fsdp=2,tensor=2", "data=8"), ("tensor=4,data=2", "fsdp=8")],
)
def test_weights_are_equal_and_apart_from_the_given_ones(before: str, after: str) -> None:
    first, second = (Layout.parse(one, weights_dtype="f32") for one in (before, after))
    mesh = device_mesh(first)
    params = init_params(MODEL, first, mesh, 0)
    move = WeightsMover(MODEL, first, second, mesh, MACHINE)
    moved = flatten(move(params))
    expected = {path: np.asarray(array) for path, array in flatten(params).items()}
    jax.tree.map(lambda array: array.delete(), params)
    for path, wanted in flatten(abstract_params(MODEL, second, move.target)).items():
        assert (moved[path].sharding, moved[path].dtype) == (wanted.sharding, wanted.dtype)
        np.testing.assert_array_equal(moved[path], expected[path])
