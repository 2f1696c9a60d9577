"""The published algorithms, step by step, from a layout of the named arrays and nothing else.

Sources: How to Scale Your Model, "Training" (data, fully sharded and tensor parallelism) and
"Inference" (sharded KV caches, 2D weight-stationary); Megatron-LM (f and g, sequence parallelism,
vocabulary); Flash-decoding (partial softmax); GShard (experts). The books' "on critical path", "can be
done async" and "can be done ahead of time" are the timings; the loss is left out, as they leave it.
"""

import numpy as np
import pytest
from tests.notation.chains import key, simulate
from tests.notation.devices import Devices

from meshwright.errors import NotationError
from meshwright.notation.algorithm import Algorithm, Local, Step
from meshwright.notation.chain import Chain
from meshwright.notation.collective import Collective, ring_bytes
from meshwright.notation.derive import derive
from meshwright.notation.mesh import Mesh

MLP = Chain.parse("""
    Tmp[B, F] = In[B, D] . Win[D, F]
    Out[B, D] = Tmp . Wout[F, D]
""")


def algorithm(chain: Chain, layout: str) -> Algorithm:
    return derive(chain, chain.layout(layout))


def assert_steps(found: Algorithm, forward: str, backward: str = "") -> None:
    """Every line, as the book numbers them; blanks do not count."""
    lines = [line.strip() for line in found.lines()]
    start = lines.index("Backward pass:")
    assert [line.partition(". ")[2] for line in lines[1:start]] == _lines(forward)
    if backward:
        assert [line.partition(". ")[2] for line in lines[start + 1 :]] == _lines(backward)


def _moved(steps: tuple[Step, ...]) -> list[str]:
    """The collectives without their timing; slices move nothing."""
    found = [s for s in steps if isinstance(s.action, Collective) and s.action.op != "slice"]
    return [str(step).partition("  (")[0] for step in found]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def volume(steps: list[Collective], mesh: Mesh, sizes: dict[str, int]) -> float:
    """bf16 bytes round the ring: V for a gather or a scatter, 2 V for an all-reduce."""
    return sum(ring_bytes(s.op, s.gathered_bytes(mesh, sizes, "bf16"), mesh.size(s.axes)) for s in steps)


SIZES = {"B": 64, "D": 128, "F": 512}
B, D, F = SIZES.values()
X, Y, Z = 4, 2, 2
MESH = Mesh({"X": X, "Y": Y, "Z": Z})


class TestTraining:
    """ "Training", the four algorithms, and the bytes of reference table 5."""

    def test_without_parallelism(self) -> None:
        assert_steps(
            algorithm(MLP, ""),
            """Tmp[B, F] = In[B, D] ·_D Win[D, F]
            Out[B, D] = Tmp[B, F] ·_F Wout[F, D]""",
            """dOut[B, D] = ...
            dWout[F, D] = Tmp[B, F] ·_B dOut[B, D]
            dTmp[B, F] = dOut[B, D] ·_D Wout[F, D]
            dWin[D, F] = In[B, D] ·_B dTmp[B, F]
            dIn[B, D] = dTmp[B, F] ·_F Win[D, F]""",
        )

    def test_data_parallelism(self) -> None:
        found = algorithm(MLP, "In[B_X, D] Out[B_X, D]")
        assert_steps(
            found,
            """Tmp[B_X, F] = In[B_X, D] ·_D Win[D, F]
            Out[B_X, D] = Tmp[B_X, F] ·_F Wout[F, D]""",
            """dOut[B_X, D] = ...
            dWout[F, D]{U_X} = Tmp[B_X, F] ·_B dOut[B_X, D]
            dWout[F, D] = AllReduce_X(dWout[F, D]{U_X})  (can be deferred)
            dTmp[B_X, F] = dOut[B_X, D] ·_D Wout[F, D]
            dWin[D, F]{U_X} = In[B_X, D] ·_B dTmp[B_X, F]
            dWin[D, F] = AllReduce_X(dWin[D, F]{U_X})  (can be deferred)
            dIn[B_X, D] = dTmp[B_X, F] ·_F Win[D, F]""",
        )
        assert volume(found.collectives(), MESH, SIZES) == 8 * D * F
        assert found.collectives("critical", "ahead") == []

    def test_fully_sharded_data_parallelism(self) -> None:
        found = algorithm(MLP, "In[B_X, D] Win[D_X, F] Wout[F, D_X] Out[B_X, D]")
        assert_steps(
            found,
            """Win[D, F] = AllGather_X(Win[D_X, F])  (ahead of time)
            Tmp[B_X, F] = In[B_X, D] ·_D Win[D, F]
            Wout[F, D] = AllGather_X(Wout[F, D_X])  (ahead of time)
            Out[B_X, D] = Tmp[B_X, F] ·_F Wout[F, D]""",
            """dOut[B_X, D] = ...
            dWout[F, D]{U_X} = Tmp[B_X, F] ·_B dOut[B_X, D]
            dWout[F, D_X] = ReduceScatter_X(dWout[F, D]{U_X})  (can be deferred)
            Wout[F, D] = AllGather_X(Wout[F, D_X])  (ahead of time; or keep forward 3)
            dTmp[B_X, F] = dOut[B_X, D] ·_D Wout[F, D]
            dWin[D, F]{U_X} = In[B_X, D] ·_B dTmp[B_X, F]
            dWin[D_X, F] = ReduceScatter_X(dWin[D, F]{U_X})  (can be deferred)
            Win[D, F] = AllGather_X(Win[D_X, F])  (ahead of time; or keep forward 1)
            dIn[B_X, D] = dTmp[B_X, F] ·_F Win[D, F]""",
        )
        assert volume(found.collectives(), MESH, SIZES) == (4 + 8) * D * F
        assert found.collectives("critical") == []

    def test_tensor_parallelism(self) -> None:
        found = algorithm(MLP, "In[B, D_Y] Win[D, F_Y] Wout[F_Y, D] Out[B, D_Y]")
        assert_steps(
            found,
            """In[B, D] = AllGather_Y(In[B, D_Y])  (on critical path)
            Tmp[B, F_Y] = In[B, D] ·_D Win[D, F_Y]
            Out[B, D]{U_Y} = Tmp[B, F_Y] ·_F Wout[F_Y, D]
            Out[B, D_Y] = ReduceScatter_Y(Out[B, D]{U_Y})  (on critical path)""",
            """dOut[B, D_Y] = ...
            dOut[B, D] = AllGather_Y(dOut[B, D_Y])  (on critical path)
            dWout[F_Y, D] = Tmp[B, F_Y] ·_B dOut[B, D]
            dTmp[B, F_Y] = dOut[B, D] ·_D Wout[F_Y, D]
            In[B, D] = AllGather_Y(In[B, D_Y])  (ahead of time; or keep forward 1)
            dWin[D, F_Y] = In[B, D] ·_B dTmp[B, F_Y]
            dIn[B, D]{U_Y} = dTmp[B, F_Y] ·_F Win[D, F_Y]
            dIn[B, D_Y] = ReduceScatter_Y(dIn[B, D]{U_Y})  (on critical path)""",
        )
        # 4BD + 4BD, where the input's second gather is shared with the first.
        assert volume(found.collectives("critical"), MESH, SIZES) == 4 * B * D + 4 * B * D
        assert volume(found.collectives("ahead"), MESH, SIZES) == 2 * B * D

    def test_fully_sharded_and_tensor_parallelism(self) -> None:
        found = algorithm(MLP, "In[B_X, D_Y] Win[D_X, F_Y] Wout[F_Y, D_X] Out[B_X, D_Y]")
        assert_steps(
            found,
            """In[B_X, D] = AllGather_Y(In[B_X, D_Y])  (on critical path)
            Win[D, F_Y] = AllGather_X(Win[D_X, F_Y])  (ahead of time)
            Tmp[B_X, F_Y] = In[B_X, D] ·_D Win[D, F_Y]
            Wout[F_Y, D] = AllGather_X(Wout[F_Y, D_X])  (ahead of time)
            Out[B_X, D]{U_Y} = Tmp[B_X, F_Y] ·_F Wout[F_Y, D]
            Out[B_X, D_Y] = ReduceScatter_Y(Out[B_X, D]{U_Y})  (on critical path)""",
            """dOut[B_X, D_Y] = ...
            dOut[B_X, D] = AllGather_Y(dOut[B_X, D_Y])  (on critical path)
            dWout[F_Y, D]{U_X} = Tmp[B_X, F_Y] ·_B dOut[B_X, D]
            dWout[F_Y, D_X] = ReduceScatter_X(dWout[F_Y, D]{U_X})  (can be deferred)
            Wout[F_Y, D] = AllGather_X(Wout[F_Y, D_X])  (ahead of time; or keep forward 4)
            dTmp[B_X, F_Y] = dOut[B_X, D] ·_D Wout[F_Y, D]
            In[B_X, D] = AllGather_Y(In[B_X, D_Y])  (ahead of time; or keep forward 1)
            dWin[D, F_Y]{U_X} = In[B_X, D] ·_B dTmp[B_X, F_Y]
            dWin[D_X, F_Y] = ReduceScatter_X(dWin[D, F_Y]{U_X})  (can be deferred)
            Win[D, F_Y] = AllGather_X(Win[D_X, F_Y])  (ahead of time; or keep forward 2)
            dIn[B_X, D]{U_Y} = dTmp[B_X, F_Y] ·_F Win[D, F_Y]
            dIn[B_X, D_Y] = ReduceScatter_Y(dIn[B_X, D]{U_Y})  (on critical path)""",
        )
        forward = 4 * B * D / X + 4 * D * F / Y
        # The published 8BD/X of the backward pass is these 4BD/X, the shared gather, 2BD/X, and as
        # much again: an upper bound, which the steps printed beside it do not reach.
        backward = (4 + 2) * B * D / X + 8 * D * F / Y
        assert volume(found.collectives(), MESH, SIZES) == forward + backward

    def test_data_parallel_replicas_of_fsdp_reduce_a_shard(self) -> None:
        """Hybrid sharding: the gradient is scattered over X, and only its shard summed over Z."""
        found = algorithm(MLP, "In[B_ZX, D] Win[D_X, F] Wout[F, D_X] Out[B_ZX, D]")
        assert [str(c) for c in found.collectives("deferred")] == [
            "ReduceScatter_{X} dWout[F, D]{U_ZX} -> dWout[F, D_X]{U_Z}",
            "AllReduce_{Z} dWout[F, D_X]{U_Z} -> dWout[F, D_X]",
            "ReduceScatter_{X} dWin[D, F]{U_ZX} -> dWin[D_X, F]{U_Z}",
            "AllReduce_{Z} dWin[D_X, F]{U_Z} -> dWin[D_X, F]",
        ]


BLOCK = Chain.parse("""
    h[B, T, D] = norm_D(x[B, T, D], scale[D])
    gate[B, T, F] = h . w_gate[D, F]
    up[B, T, F] = h . w_in[D, F]
    a[B, T, F] = swiglu(gate, up)
    y[B, T, D] = a . w_out[F, D]
    z[B, T, D] = add(x, y)
""")


class TestMegatron:
    """f is the identity forward and an AllReduce backward; g the other way round."""

    def test_column_then_row_parallel(self) -> None:
        found = algorithm(MLP, "Win[D, F_Y] Wout[F_Y, D]")
        assert _moved(found.forward) == ["Out[B, D] = AllReduce_Y(Out[B, D]{U_Y})"]
        assert _moved(found.backward) == ["dIn[B, D] = AllReduce_Y(dIn[B, D]{U_Y})"]

    def test_with_sequence_parallelism_they_gather_and_scatter(self) -> None:
        found = algorithm(
            BLOCK, "x[B, T_Y, D] w_gate[D, F_Y] w_in[D, F_Y] w_out[F_Y, D] z[B, T_Y, D] y[B, T_Y, D]"
        )
        assert [str(c) for c in found.collectives("critical")] == [
            "AllGather_{Y} h[B, T_Y, D] -> h[B, T, D]",
            "ReduceScatter_{Y} y[B, T, D]{U_Y} -> y[B, T_Y, D]",
            "AllGather_{Y} dy[B, T_Y, D] -> dy[B, T, D]",
            "ReduceScatter_{Y} dh[B, T, D]{U_Y} -> dh[B, T_Y, D]",
        ]

    def test_a_norms_scale_has_its_gradient_summed_over_all_that_splits_its_input(self) -> None:
        found = algorithm(BLOCK, "x[B_X, T_Y, D] w_gate[D, F_Y] w_in[D, F_Y] w_out[F_Y, D] z[B_X, T_Y, D]")
        of_scale = [c for c in found.collectives("deferred") if c.operand.name == "dscale"]
        assert [str(c) for c in of_scale] == ["AllReduce_{X,Y} dscale[D]{U_XY} -> dscale[D]"]

    def test_projections_of_one_input_share_its_gather_and_its_reduction(self) -> None:
        found = algorithm(BLOCK, "x[B, T_Y, D] w_gate[D, F_Y] w_in[D, F_Y] w_out[F_Y, D] y[B, T_Y, D]")
        gather = next(s for s in found.forward if s.result.name == "h" and isinstance(s.action, Collective))
        readers = [
            s for s in found.forward if isinstance(s.action, Local) and gather.result in s.action.operands
        ]
        assert [s.result.name for s in readers] == ["gate", "up"]
        partial = [str(s) for s in found.backward if s.result.name == "dh"]
        assert partial == [
            "dh[B, T, D]{U_Y} = dup[B, T, F_Y] ·_F w_in[D, F_Y]",
            "dh[B, T, D]{U_Y} += dgate[B, T, F_Y] ·_F w_gate[D, F_Y]",
            "dh[B, T_Y, D] = ReduceScatter_Y(dh[B, T, D]{U_Y})  (on critical path)",
        ]

    def test_the_vocabulary_embedding_sums_and_the_loss_reduces_small_arrays(self) -> None:
        """Maximum, sum of exponentials and target's logit, all [B, T]; never the logits [B, T, V]."""
        chain = Chain.parse(
            """x[B, T, D] = tokens[B, T, V] . embed[V, D]
            logits[B, T, V] = x . unembed[D, V]
            peak[B, T] = max_V(logits)
            e[B, T, V] = exp(logits, peak)
            total[B, T] = sum_V(e)
            hit[B, T] = logits . targets[B, T, V]
            loss[B, T] = nll(hit, peak, total)""",
            constants=("tokens", "targets"),
        )
        found = algorithm(chain, "embed[V_Y, D] unembed[D, V_Y]")
        assert _moved(found.forward) == [
            "x[B, T, D] = AllReduce_Y(x[B, T, D]{U_Y})",
            "peak[B, T] = AllReduceMax_Y(peak[B, T]{U_Y})",
            "total[B, T] = AllReduce_Y(total[B, T]{U_Y})",
            "hit[B, T] = AllReduce_Y(hit[B, T]{U_Y})",
        ]
        assert _moved(found.backward) == ["dx[B, T, D] = AllReduce_Y(dx[B, T, D]{U_Y})"]


ATTENTION = Chain.parse(
    """Q[B, N, H] = X[B, D] . Wq[D, N, H]
    Qg[B, K, G, H] = split(Q)
    L[B, K, G, S] = Qg . Kc[B, S, K, H]
    M[B, K, G] = max_S(L)
    E[B, K, G, S] = exp(L, M)
    Z[B, K, G] = sum_S(E)
    A[B, K, G, H] = E . Vc[B, S, K, H]
    O[B, K, G, H] = divide(A, Z)
    Om[B, N, H] = merge(O)
    Y[B, D] = Om . Wo[N, H, D]""",
    constants=("Kc", "Vc"),
)
BATCH_SHARDED = "Wq[D, N_YZ, H] Kc[B_Z, S, K_Y, H] Vc[B_Z, S, K_Y, H] Wo[N_YZ, H, D]"
SEQUENCE_SHARDED = "Wq[D, N_Y, H] Kc[B, S_Z, K_Y, H] Vc[B, S_Z, K_Y, H] Wo[N_Y, H, D]"


class TestInference:
    def test_batch_sharded_caches_take_two_all_to_alls(self) -> None:
        """The 12 steps of "Inference", KV[2, B_Z, S, K_Y, H], with softmax written out.

        The book moves O[B, K_Y, M_Z, H] before its last reshape: those are blocks of N_YZ only where
        K = Y. Merged first, they move for any K.
        """
        assert_steps(
            algorithm(ATTENTION, BATCH_SHARDED),
            """Q[B, N_YZ, H] = X[B, D] ·_D Wq[D, N_YZ, H]
            Q[B_Z, N_Y, H] = AllToAll_Z(Q[B, N_YZ, H])  (on critical path)
            Qg[B_Z, K_Y, G, H] = split(Q[B_Z, N_Y, H])
            L[B_Z, K_Y, G, S] = Qg[B_Z, K_Y, G, H] ·_H Kc[B_Z, S, K_Y, H]
            M[B_Z, K_Y, G] = max_S(L[B_Z, K_Y, G, S])
            E[B_Z, K_Y, G, S] = exp(L[B_Z, K_Y, G, S], M[B_Z, K_Y, G])
            Z[B_Z, K_Y, G] = sum_S(E[B_Z, K_Y, G, S])
            A[B_Z, K_Y, G, H] = E[B_Z, K_Y, G, S] ·_S Vc[B_Z, S, K_Y, H]
            O[B_Z, K_Y, G, H] = divide(A[B_Z, K_Y, G, H], Z[B_Z, K_Y, G])
            Om[B_Z, N_Y, H] = merge(O[B_Z, K_Y, G, H])
            Om[B, N_YZ, H] = AllToAll_Z(Om[B_Z, N_Y, H])  (on critical path)
            Y[B, D]{U_YZ} = Om[B, N_YZ, H] ·_NH Wo[N_YZ, H, D]
            Y[B, D] = AllReduce_YZ(Y[B, D]{U_YZ})  (on critical path)""",
        )

    def test_sequence_sharded_caches_combine_small_arrays(self) -> None:
        """Maximum, sum and weighted values are partial over S's axis; the cache stays where it is."""
        found = algorithm(ATTENTION, SEQUENCE_SHARDED)
        assert _moved(found.forward) == [
            "M[B, K_Y, G] = AllReduceMax_Z(M[B, K_Y, G]{U_Z})",
            "Z[B, K_Y, G] = AllReduce_Z(Z[B, K_Y, G]{U_Z})",
            "A[B, K_Y, G, H] = AllReduce_Z(A[B, K_Y, G, H]{U_Z})",
            "Y[B, D] = AllReduce_Y(Y[B, D]{U_Y})",
        ]
        assert not any("S" in c.result.dims for c in found.collectives())

    @pytest.mark.parametrize("layout", ["", BATCH_SHARDED, SEQUENCE_SHARDED])
    def test_both_compute_attention(self, layout: str) -> None:
        mesh, sizes = Mesh({"Y": 2, "Z": 2}), {"B": 4, "N": 8, "K": 4, "G": 2, "H": 2, "S": 6, "D": 3}
        devices, draw = Devices(mesh), np.random.default_rng(0)
        found, shapes = algorithm(ATTENTION, layout), ATTENTION.layout(layout)
        arrays = {
            name: draw.normal(size=[sizes[d] for d in ATTENTION.arrays[name].dims])
            for name in (*ATTENTION.stored, "X")
        }
        homes = {name: shapes.get(name, ATTENTION.arrays[name]) for name in arrays}
        given = {key(home): devices.place(arrays[name], home) for name, home in homes.items()}
        d_y = ATTENTION.arrays["Y"].replace(name="dY")
        given[key(d_y)] = devices.place(draw.normal(size=(4, 3)), d_y)
        y = simulate(found, devices, sizes, given)[key(ATTENTION.arrays["Y"])]
        # Dense, with softmax as it is defined.
        q = np.einsum("bd,dnh->bnh", arrays["X"], arrays["Wq"]).reshape(4, 4, 2, 2)
        scores = np.exp(np.einsum("bkgh,bskh->bkgs", q, arrays["Kc"]))
        p = scores / scores.sum(axis=-1, keepdims=True)
        o = np.einsum("bkgs,bskh->bkgh", p, arrays["Vc"]).reshape(4, 8, 2)
        for block in y.values():
            np.testing.assert_allclose(block, np.einsum("bnh,nhd->bd", o, arrays["Wo"]), rtol=1e-12)

    def test_2d_weight_stationary(self) -> None:
        found = algorithm(MLP, "In[B, D_XYZ] Win[D_X, F_YZ] Wout[F_YZ, D_X] Out[B, D_XYZ]")
        assert_steps(
            found,
            """In[B, D_X] = AllGather_YZ(In[B, D_XYZ])  (on critical path)
            Tmp[B, F_YZ]{U_X} = In[B, D_X] ·_D Win[D_X, F_YZ]
            Tmp[B, F_YZ] = AllReduce_X(Tmp[B, F_YZ]{U_X})  (on critical path)
            Out[B, D_X]{U_YZ} = Tmp[B, F_YZ] ·_F Wout[F_YZ, D_X]
            Out[B, D_XYZ] = ReduceScatter_YZ(Out[B, D_X]{U_YZ})  (on critical path)""",
        )
        forward = [s.action for s in found.forward if isinstance(s.action, Collective)]
        # Each direction of the activations goes over two axes' links at once, the sum over one:
        # 2BD/(X W) + 4BF/(YZ W) seconds.
        over_two, over_one = forward[0::2], forward[1::2]
        assert volume(over_two, MESH, SIZES) / 2 == 2 * B * D / X
        assert volume(over_one, MESH, SIZES) == 4 * B * F / (Y * Z)

    def test_1d_weight_stationary(self) -> None:
        """4BD over three axes: In is gathered and Out scattered over all of them."""
        found = algorithm(MLP, "In[B, D_XYZ] Win[D, F_XYZ] Wout[F_XYZ, D] Out[B, D_XYZ]")
        forward = [s.action for s in found.forward if isinstance(s.action, Collective)]
        assert volume(forward, MESH, SIZES) == 4 * B * D
        assert {step.axes for step in forward} == {("X", "Y", "Z")}


class TestExperts:
    MOE = Chain.parse("""
        logits[P, C, E] = x[P, C, D] . w_route[D, E]
        route[P, C, E, S] = top_CE(logits)
        sent[E, P, S, D] = x . route
        h[E, P, S, F] = sent . w_in[E, D, F]
        a[E, P, S, F] = gelu(h)
        back[E, P, S, D] = a . w_out[E, F, D]
        y[P, C, D] = back . route
    """)
    LAYOUT = "x[P_Z, C, D] w_in[E_Z, D, F] w_out[E_Z, F, D] y[P_Z, C, D]"

    def test_expert_parallelism_takes_two_all_to_alls_each_way(self) -> None:
        """P parts of C tokens each, S slots an expert: tokens go to their experts over Z and return."""
        found = algorithm(self.MOE, self.LAYOUT)
        assert [str(c) for c in found.collectives("critical")] == [
            "AllToAll_{Z} sent[E, P_Z, S, D] -> sent[E_Z, P, S, D]",
            "AllToAll_{Z} back[E_Z, P, S, D] -> back[E, P_Z, S, D]",
            "AllToAll_{Z} dback[E, P_Z, S, D] -> dback[E_Z, P, S, D]",
            "AllToAll_{Z} dsent[E_Z, P, S, D] -> dsent[E, P_Z, S, D]",
        ]

    def test_the_experts_stay_and_only_the_routers_gradient_is_summed(self) -> None:
        found = algorithm(self.MOE, self.LAYOUT)
        assert [str(c) for c in found.collectives("ahead", "deferred")] == [
            "AllReduce_{Z} dw_route[D, E]{U_Z} -> dw_route[D, E]"
        ]

    def test_with_fsdp_and_tensor_parallelism_inside_the_experts(self) -> None:
        """The book's W[E_Z, D_X, F_Y] in training: gathered over X, stationary over Y and Z."""
        inside = "w_in[E_Z, D_X, F_Y] w_out[E_Z, F_Y, D_X] back[E_Z, P_X, S, D]"
        found = algorithm(self.MOE, f"x[P_XZ, C, D] {inside} y[P_XZ, C, D]")
        assert _moved(found.forward) == [
            "sent[E_Z, P_X, S, D] = AllToAll_Z(sent[E, P_XZ, S, D])",
            "w_in[E_Z, D, F_Y] = AllGather_X(w_in[E_Z, D_X, F_Y])",
            "w_out[E_Z, F_Y, D] = AllGather_X(w_out[E_Z, F_Y, D_X])",
            "back[E_Z, P_X, S, D] = AllReduce_Y(back[E_Z, P_X, S, D]{U_Y})",
            "back[E, P_XZ, S, D] = AllToAll_Z(back[E_Z, P_X, S, D])",
        ]


class TestDeferredReduction:
    def test_a_wanted_partial_sum_is_left(self) -> None:
        found = algorithm(MLP, "Win[D, F_Y] Wout[F_Y, D] Out[B, D]{U_Y}")
        assert [s for s in found.forward if isinstance(s.action, Collective)] == []

    def test_a_sum_over_an_axis_that_can_split_no_summed_dimension_is_refused(self) -> None:
        message = r"^z\[B, T, D\]\{U_X\}: nothing that x\[B, T, D\], y\[B, T, D\] share is summed over there$"
        with pytest.raises(NotationError, match=message):
            algorithm(BLOCK, "z[B, T, D]{U_X}")
