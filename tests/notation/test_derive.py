"""Derived algorithms: any chain under any layout computes the dense result and the dense gradients."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.notation.chains import (
    Arrays,
    Key,
    chains,
    directional,
    evaluate,
    key,
    layouts,
    letter_sizes,
    random_arrays,
    simulate,
)
from tests.notation.devices import Blocks, Devices, meshes

from meshwright.notation.algorithm import Algorithm
from meshwright.notation.array import ShardedArray
from meshwright.notation.chain import Chain
from meshwright.notation.derive import derive
from meshwright.notation.einsum import cotangent
from meshwright.notation.mesh import Mesh


@dataclass(frozen=True)
class Case:
    """A chain under a layout on a mesh, with values for its leaves and for its results' cotangents."""

    chain: Chain
    mesh: Mesh
    layout: dict[str, ShardedArray]

    @property
    def sizes(self) -> dict[str, int]:
        return letter_sizes(self.mesh)

    @property
    def algorithm(self) -> Algorithm:
        return derive(self.chain, self.layout)

    @property
    def leaves(self) -> dict[str, ShardedArray]:
        names = (*self.chain.stored, self.chain.source)
        return {name: self.layout.get(name, self.chain.arrays[name]) for name in names}

    @property
    def results(self) -> dict[str, ShardedArray]:
        """The results where they end."""
        made = {step.result.name: step.result for step in self.algorithm.forward}
        return {name: made[name] for name in self.chain.results}

    def arrays(self, seed: int = 0) -> Arrays:
        return random_arrays(self.leaves, self.sizes, seed)

    def cotangents(self) -> Arrays:
        return random_arrays(self.results, self.sizes, 9)

    def run(self) -> dict[Key, Blocks]:
        devices = Devices(self.mesh)
        values, cotangents = self.arrays(), self.cotangents()
        given = {key(a): devices.place(values[name], a) for name, a in self.leaves.items()}
        for name, array in self.results.items():
            d_array = cotangent(array)
            given[key(d_array)] = devices.place(cotangents[name], d_array)
        return simulate(self.algorithm, devices, self.sizes, given)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    chain, mesh = draw(chains()), draw(meshes(max_devices=8))
    return Case(chain, mesh, draw(layouts(chain, mesh)))


@given(chains())
def test_the_unsharded_algorithm_is_the_transpose_of_the_derivative(chain: Chain) -> None:
    """<d out, out'> = <d in, in'> for any direction in'; integers wrap, so it is exact."""
    case = Case(chain, Mesh({"X": 1}), {})
    tangents, values = case.arrays(seed=1), evaluate(chain, case.sizes, case.arrays())
    moved, blocks = directional(chain, case.sizes, values, tangents), case.run()
    cotangents = case.cotangents()
    forward = sum(np.sum(cotangents[name] * moved[name]) for name in chain.results)
    backward = sum(np.sum(blocks[key(cotangent(a))][0,] * tangents[name]) for name, a in case.leaves.items())
    assert forward == backward


@given(cases())
def test_devices_together_compute_the_dense_results_and_gradients(case: Case) -> None:
    check_against_dense(case)


@pytest.mark.slow
@settings(max_examples=5000)
@given(cases())
def test_devices_together_compute_the_dense_results_and_gradients_at_length(case: Case) -> None:
    check_against_dense(case)


def check_against_dense(case: Case) -> None:
    devices, blocks = Devices(case.mesh), case.run()
    dense = _dense(case)
    for name, array in case.leaves.items():
        d_array = cotangent(array)
        devices.assert_holds(blocks[key(d_array)], dense[f"d{name}"], d_array)
    for name, array in case.results.items():
        devices.assert_holds(blocks[key(array)], dense[name], array)
        assert array.same_layout(case.layout.get(name, array))


def _dense(case: Case) -> Arrays:
    """Results and gradients by the unsharded algorithm, on the same values."""
    algorithm, one = derive(case.chain, {}), Devices(Mesh({}))
    given = {key(case.chain.arrays[name]): {(): value} for name, value in case.arrays().items()}
    for name, value in case.cotangents().items():
        given[key(cotangent(case.chain.arrays[name]))] = {(): value}
    values = simulate(algorithm, one, case.sizes, given)
    whole = [*case.chain.arrays.values(), *map(cotangent, case.chain.arrays.values())]
    return {a.name: values[key(a)][()] for a in whole if key(a) in values}
