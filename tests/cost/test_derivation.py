"""What the cost model prices is what the algebra derives: a whole layer, under any layout."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from tests.cost.recorded import B, D, F, H, K, N, T, moves

from meshwright.layout import Layout
from meshwright.notation.algorithm import Step
from meshwright.notation.array import ShardedArray
from meshwright.notation.chain import Chain
from meshwright.notation.collective import Collective
from meshwright.notation.derive import derive

# models/transformer.py's block as names. Causal masks, positions and scales of scores move nothing.
LAYER = Chain.parse("""
    h[B, T, D] = norm_D(x[B, T, D], attention_norm[D])
    q[B, T, N, H] = h . wq[D, N, H]
    k[B, T, K, H] = h . wk[D, K, H]
    v[B, T, K, H] = h . wv[D, K, H]
    qg[B, T, K, G, H] = split(q)
    ks[B, S, K, H] = rename(k)
    vs[B, S, K, H] = rename(v)
    scores[B, K, G, T, S] = qg . ks
    p[B, K, G, T, S] = softmax_S(scores)
    og[B, T, K, G, H] = p . vs
    o[B, T, N, H] = merge(og)
    y[B, T, D] = o . wo[N, H, D]
    x2[B, T, D] = add(x, y)
    h2[B, T, D] = norm_D(x2, mlp_norm[D])
    gate[B, T, F] = h2 . w_gate[D, F]
    up[B, T, F] = h2 . w_in[D, F]
    a[B, T, F] = swiglu(gate, up)
    z[B, T, D] = a . w_out[F, D]
    x3[B, T, D] = add(x2, z)
""")
SIZES = {"B": B, "T": T, "S": T, "D": D, "F": F, "N": N, "K": K, "G": N // K, "H": H}
NORMS = ("attention_norm", "mlp_norm")
DEGREES = st.sampled_from([1, 2, 4])
LAYOUTS = st.builds(
    Layout.of,
    data=DEGREES,
    fsdp=DEGREES,
    context=DEGREES,
    tensor=DEGREES,
    sequence_parallel=st.booleans(),
    weights_dtype=st.just("bf16"),
)


def _shardings(layout: Layout) -> dict[str, ShardedArray]:
    """Stored weights and the residual stream as the Layout has them; the rest follows."""
    weights = {n: LAYER.arrays[n] for n in LAYER.stored}
    found = {name: layout.weight(name, "".join(array.dims)) for name, array in weights.items()}
    named = ("x", "y", "x2", "z", "x3", "q", "k", "v", "scores")
    return found | {n: layout.activation(n, "".join(LAYER.arrays[n].dims)) for n in named}


def _said(step: Step, layout: Layout) -> tuple:
    """A derived collective in the cost model's words."""
    assert isinstance(step.action, Collective)
    array = step.result.name.removeprefix("d")
    dtype = "f32" if array in NORMS else layout.precision.compute_dtype
    num_bytes = step.action.gathered_bytes(layout.mesh, SIZES, dtype)
    # The gather of an activation that the backward pass repeats is the cost model's recomputation, which
    # it prices as it did forward, though nothing of the backward pass comes before it.
    critical = step.timing == "critical" or (step.repeats is not None and array not in LAYER.stored)
    return step.action.op, step.action.axes, num_bytes, critical


@given(LAYOUTS)
def test_the_cost_model_prices_the_derived_algorithm(layout: Layout) -> None:
    algorithm = derive(LAYER, _shardings(layout))
    derived = Counter(
        _said(step, layout)
        for step in (*algorithm.forward, *algorithm.backward)
        if isinstance(step.action, Collective) and step.action.op != "slice"
    )
    priced = Counter(
        (move.transfer.op, move.transfer.axes, move.transfer.gathered_bytes, move.transfer.critical)
        for move in moves(layout)
        if move.segment == "layer"
    )
    assert derived == priced
