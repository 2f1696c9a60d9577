"""Every step of both passes of Megatron, GShard and flash-decoding, written down from their papers.

test_known_algorithms.py compares the collectives of these layouts; here each local product, each sum and
each collective stands as the papers have it, with what waits for what.
Sources: Shoeybi et al. 2019, section 3 (f and g); Korthikanti et al. 2022, section 4.2 (sequence
parallelism: f becomes an all-gather, g a reduce-scatter; of a gathered input the shard is kept and gathered
again); Lepikhin et al. 2020, algorithm 2 and section 3.2 (dispatch and combine, two all-to-alls a pass);
Dao et al. 2023, "Flash-Decoding for long-context inference" (local softmax, then a log-sum-exp combine).
"""

import numpy as np
from tests.notation import test_known_algorithms as known
from tests.notation.chains import key, simulate
from tests.notation.devices import Devices
from tests.notation.test_known_algorithms import (
    ATTENTION,
    BLOCK,
    MLP,
    SEQUENCE_SHARDED,
    algorithm,
    assert_steps,
)

from meshwright.notation.chain import Chain
from meshwright.notation.mesh import Mesh


class TestMegatron:
    def test_the_mlp(self) -> None:
        """Columns of A, rows of B: f passes X on and sums dX, g sums Z and passes dZ on."""
        assert_steps(
            algorithm(MLP, "Win[D, F_Y] Wout[F_Y, D]"),
            """Tmp[B, F_Y] = In[B, D] ·_D Win[D, F_Y]
            Out[B, D]{U_Y} = Tmp[B, F_Y] ·_F Wout[F_Y, D]
            Out[B, D] = AllReduce_Y(Out[B, D]{U_Y})  (on critical path)""",
            """dOut[B, D] = ...
            dWout[F_Y, D] = Tmp[B, F_Y] ·_B dOut[B, D]
            dTmp[B, F_Y] = dOut[B, D] ·_D Wout[F_Y, D]
            dWin[D, F_Y] = In[B, D] ·_B dTmp[B, F_Y]
            dIn[B, D]{U_Y} = dTmp[B, F_Y] ·_F Win[D, F_Y]
            dIn[B, D] = AllReduce_Y(dIn[B, D]{U_Y})  (on critical path)""",
        )

    def test_the_attention(self) -> None:
        """Heads of Q, K and V by columns, the output by rows. One f: the three sums of dx are added first."""
        attention = Chain.parse("""
            q[B, T, N, H] = x[B, T, D] . w_q[D, N, H]
            k[B, T, N, H] = x . w_k[D, N, H]
            v[B, T, N, H] = x . w_v[D, N, H]
            ks[B, S, N, H] = rename(k)
            vs[B, S, N, H] = rename(v)
            s[B, N, T, S] = q . ks
            p[B, N, T, S] = softmax_S(s)
            o[B, T, N, H] = p . vs
            y[B, T, D] = o . w_o[N, H, D]
        """)
        assert_steps(
            algorithm(attention, "w_q[D, N_Y, H] w_k[D, N_Y, H] w_v[D, N_Y, H] w_o[N_Y, H, D]"),
            """q[B, T, N_Y, H] = x[B, T, D] ·_D w_q[D, N_Y, H]
            k[B, T, N_Y, H] = x[B, T, D] ·_D w_k[D, N_Y, H]
            v[B, T, N_Y, H] = x[B, T, D] ·_D w_v[D, N_Y, H]
            ks[B, S, N_Y, H] = rename(k[B, T, N_Y, H])
            vs[B, S, N_Y, H] = rename(v[B, T, N_Y, H])
            s[B, N_Y, T, S] = q[B, T, N_Y, H] ·_H ks[B, S, N_Y, H]
            p[B, N_Y, T, S] = softmax_S(s[B, N_Y, T, S])
            o[B, T, N_Y, H] = p[B, N_Y, T, S] ·_S vs[B, S, N_Y, H]
            y[B, T, D]{U_Y} = o[B, T, N_Y, H] ·_NH w_o[N_Y, H, D]
            y[B, T, D] = AllReduce_Y(y[B, T, D]{U_Y})  (on critical path)""",
            """dy[B, T, D] = ...
            dw_o[N_Y, H, D] = o[B, T, N_Y, H] ·_BT dy[B, T, D]
            do[B, T, N_Y, H] = dy[B, T, D] ·_D w_o[N_Y, H, D]
            dp[B, N_Y, T, S] = do[B, T, N_Y, H] ·_H vs[B, S, N_Y, H]
            dvs[B, S, N_Y, H] = p[B, N_Y, T, S] ·_T do[B, T, N_Y, H]
            ds[B, N_Y, T, S] = dp[B, N_Y, T, S] * softmax_S'(s[B, N_Y, T, S])
            dq[B, T, N_Y, H] = ds[B, N_Y, T, S] ·_S ks[B, S, N_Y, H]
            dks[B, S, N_Y, H] = q[B, T, N_Y, H] ·_T ds[B, N_Y, T, S]
            dv[B, T, N_Y, H] = rename'(dvs[B, S, N_Y, H])
            dk[B, T, N_Y, H] = rename'(dks[B, S, N_Y, H])
            dw_v[D, N_Y, H] = x[B, T, D] ·_BT dv[B, T, N_Y, H]
            dx[B, T, D]{U_Y} = dv[B, T, N_Y, H] ·_NH w_v[D, N_Y, H]
            dw_k[D, N_Y, H] = x[B, T, D] ·_BT dk[B, T, N_Y, H]
            dx[B, T, D]{U_Y} += dk[B, T, N_Y, H] ·_NH w_k[D, N_Y, H]
            dw_q[D, N_Y, H] = x[B, T, D] ·_BT dq[B, T, N_Y, H]
            dx[B, T, D]{U_Y} += dq[B, T, N_Y, H] ·_NH w_q[D, N_Y, H]
            dx[B, T, D] = AllReduce_Y(dx[B, T, D]{U_Y})  (on critical path)""",
        )

    def test_with_sequence_parallelism(self) -> None:
        """The norm, the residual and their gradients on a shard of the sequence; h is kept as its shard."""
        assert_steps(
            algorithm(
                BLOCK, "x[B, T_Y, D] w_gate[D, F_Y] w_in[D, F_Y] w_out[F_Y, D] y[B, T_Y, D] z[B, T_Y, D]"
            ),
            """h[B, T_Y, D] = norm_D(x[B, T_Y, D], scale[D])
            h[B, T, D] = AllGather_Y(h[B, T_Y, D])  (on critical path)
            gate[B, T, F_Y] = h[B, T, D] ·_D w_gate[D, F_Y]
            up[B, T, F_Y] = h[B, T, D] ·_D w_in[D, F_Y]
            a[B, T, F_Y] = swiglu(gate[B, T, F_Y], up[B, T, F_Y])
            y[B, T, D]{U_Y} = a[B, T, F_Y] ·_F w_out[F_Y, D]
            y[B, T_Y, D] = ReduceScatter_Y(y[B, T, D]{U_Y})  (on critical path)
            z[B, T_Y, D] = add(x[B, T_Y, D], y[B, T_Y, D])""",
            """dz[B, T_Y, D] = ...
            dx[B, T_Y, D] = add'(dz[B, T_Y, D])
            dy[B, T_Y, D] = add'(dz[B, T_Y, D])
            dy[B, T, D] = AllGather_Y(dy[B, T_Y, D])  (on critical path)
            dw_out[F_Y, D] = a[B, T, F_Y] ·_BT dy[B, T, D]
            da[B, T, F_Y] = dy[B, T, D] ·_D w_out[F_Y, D]
            dgate[B, T, F_Y] = da[B, T, F_Y] * swiglu'1(gate[B, T, F_Y], up[B, T, F_Y])
            dup[B, T, F_Y] = da[B, T, F_Y] * swiglu'2(gate[B, T, F_Y], up[B, T, F_Y])
            h[B, T, D] = AllGather_Y(h[B, T_Y, D])  (ahead of time; or keep forward 2)
            dw_in[D, F_Y] = h[B, T, D] ·_BT dup[B, T, F_Y]
            dh[B, T, D]{U_Y} = dup[B, T, F_Y] ·_F w_in[D, F_Y]
            dw_gate[D, F_Y] = h[B, T, D] ·_BT dgate[B, T, F_Y]
            dh[B, T, D]{U_Y} += dgate[B, T, F_Y] ·_F w_gate[D, F_Y]
            dh[B, T_Y, D] = ReduceScatter_Y(dh[B, T, D]{U_Y})  (on critical path)
            dscale[D]{U_Y} = dh[B, T_Y, D] * norm_D'2(x[B, T_Y, D], scale[D])
            dscale[D] = AllReduce_Y(dscale[D]{U_Y})  (can be deferred)
            dx[B, T_Y, D] += dh[B, T_Y, D] * norm_D'1(x[B, T_Y, D], scale[D])""",
        )


def test_gshard() -> None:
    """Dispatch, exchange, the experts where they live, exchange, combine; and the same way back."""
    assert_steps(
        algorithm(known.TestExperts.MOE, known.TestExperts.LAYOUT),
        """logits[P_Z, C, E] = x[P_Z, C, D] ·_D w_route[D, E]
        route[P_Z, C, E, S] = top_CE(logits[P_Z, C, E])
        sent[E, P_Z, S, D] = x[P_Z, C, D] ·_C route[P_Z, C, E, S]
        sent[E_Z, P, S, D] = AllToAll_Z(sent[E, P_Z, S, D])  (on critical path)
        h[E_Z, P, S, F] = sent[E_Z, P, S, D] ·_D w_in[E_Z, D, F]
        a[E_Z, P, S, F] = gelu(h[E_Z, P, S, F])
        back[E_Z, P, S, D] = a[E_Z, P, S, F] ·_F w_out[E_Z, F, D]
        back[E, P_Z, S, D] = AllToAll_Z(back[E_Z, P, S, D])  (on critical path)
        y[P_Z, C, D] = back[E, P_Z, S, D] ·_ES route[P_Z, C, E, S]""",
        """dy[P_Z, C, D] = ...
        dback[E, P_Z, S, D] = dy[P_Z, C, D] ·_C route[P_Z, C, E, S]
        dback[E_Z, P, S, D] = AllToAll_Z(dback[E, P_Z, S, D])  (on critical path)
        droute[P_Z, C, E, S] = back[E, P_Z, S, D] ·_D dy[P_Z, C, D]
        dw_out[E_Z, F, D] = a[E_Z, P, S, F] ·_PS dback[E_Z, P, S, D]
        da[E_Z, P, S, F] = dback[E_Z, P, S, D] ·_D w_out[E_Z, F, D]
        dh[E_Z, P, S, F] = da[E_Z, P, S, F] * gelu'(h[E_Z, P, S, F])
        dw_in[E_Z, D, F] = sent[E_Z, P, S, D] ·_PS dh[E_Z, P, S, F]
        dsent[E_Z, P, S, D] = dh[E_Z, P, S, F] ·_F w_in[E_Z, D, F]
        dsent[E, P_Z, S, D] = AllToAll_Z(dsent[E_Z, P, S, D])  (on critical path)
        dx[P_Z, C, D] = dsent[E, P_Z, S, D] ·_ES route[P_Z, C, E, S]
        droute[P_Z, C, E, S] += x[P_Z, C, D] ·_D dsent[E, P_Z, S, D]
        dlogits[P_Z, C, E] = droute[P_Z, C, E, S] * top_CE'(logits[P_Z, C, E])
        dw_route[D, E]{U_Z} = x[P_Z, C, D] ·_PC dlogits[P_Z, C, E]
        dw_route[D, E] = AllReduce_Z(dw_route[D, E]{U_Z})  (can be deferred)
        dx[P_Z, C, D] += dlogits[P_Z, C, E] ·_E w_route[D, E]""",
    )


# P parts of S keys each. Every part has a softmax of its own: maximum m, sum of exponentials z and
# weighted values a. The parts are weighed by exp(m - max m), as m + log z, the log-sum-exp, would weigh
# them, and added up.
FLASH_DECODING = Chain.parse(
    """Q[B, N, H] = X[B, D] . Wq[D, N, H]
    Qg[B, K, G, H] = split(Q)
    L[B, K, G, P, S] = Qg . Kc[B, P, S, K, H]
    m[B, K, G, P] = max_S(L)
    E[B, K, G, P, S] = exp(L, m)
    z[B, K, G, P] = sum_S(E)
    a[B, K, G, P, H] = E . Vc[B, P, S, K, H]
    M[B, K, G] = max_P(m)
    W[B, K, G, P] = exp(m, M)
    Z[B, K, G] = z . W
    A[B, K, G, H] = a . W
    O[B, K, G, H] = divide(A, Z)
    Om[B, N, H] = merge(O)
    Y[B, D] = Om . Wo[N, H, D]""",
    constants=("Kc", "Vc"),
)
BY_PARTS = "Wq[D, N_Y, H] Kc[B, P_Z, S, K_Y, H] Vc[B, P_Z, S, K_Y, H] Wo[N_Y, H, D]"


class TestSequenceShardedCaches:
    def test_with_one_softmax(self) -> None:
        """The maximum is known to all before an exponential is taken: three small reductions over Z."""
        assert_steps(
            algorithm(ATTENTION, SEQUENCE_SHARDED),
            """Q[B, N_Y, H] = X[B, D] ·_D Wq[D, N_Y, H]
            Qg[B, K_Y, G, H] = split(Q[B, N_Y, H])
            L[B, K_Y, G, S_Z] = Qg[B, K_Y, G, H] ·_H Kc[B, S_Z, K_Y, H]
            M[B, K_Y, G]{U_Z} = max_S(L[B, K_Y, G, S_Z])
            M[B, K_Y, G] = AllReduceMax_Z(M[B, K_Y, G]{U_Z})  (on critical path)
            E[B, K_Y, G, S_Z] = exp(L[B, K_Y, G, S_Z], M[B, K_Y, G])
            Z[B, K_Y, G]{U_Z} = sum_S(E[B, K_Y, G, S_Z])
            Z[B, K_Y, G] = AllReduce_Z(Z[B, K_Y, G]{U_Z})  (on critical path)
            A[B, K_Y, G, H]{U_Z} = E[B, K_Y, G, S_Z] ·_S Vc[B, S_Z, K_Y, H]
            A[B, K_Y, G, H] = AllReduce_Z(A[B, K_Y, G, H]{U_Z})  (on critical path)
            O[B, K_Y, G, H] = divide(A[B, K_Y, G, H], Z[B, K_Y, G])
            Om[B, N_Y, H] = merge(O[B, K_Y, G, H])
            Y[B, D]{U_Y} = Om[B, N_Y, H] ·_NH Wo[N_Y, H, D]
            Y[B, D] = AllReduce_Y(Y[B, D]{U_Y})  (on critical path)""",
        )

    def test_with_a_softmax_a_part_and_a_log_sum_exp_combine(self) -> None:
        """All of the attention is local; what follows moves B K G (2 + H) numbers, however long S is."""
        assert_steps(
            algorithm(FLASH_DECODING, BY_PARTS),
            """Q[B, N_Y, H] = X[B, D] ·_D Wq[D, N_Y, H]
            Qg[B, K_Y, G, H] = split(Q[B, N_Y, H])
            L[B, K_Y, G, P_Z, S] = Qg[B, K_Y, G, H] ·_H Kc[B, P_Z, S, K_Y, H]
            m[B, K_Y, G, P_Z] = max_S(L[B, K_Y, G, P_Z, S])
            E[B, K_Y, G, P_Z, S] = exp(L[B, K_Y, G, P_Z, S], m[B, K_Y, G, P_Z])
            z[B, K_Y, G, P_Z] = sum_S(E[B, K_Y, G, P_Z, S])
            a[B, K_Y, G, P_Z, H] = E[B, K_Y, G, P_Z, S] ·_S Vc[B, P_Z, S, K_Y, H]
            M[B, K_Y, G]{U_Z} = max_P(m[B, K_Y, G, P_Z])
            M[B, K_Y, G] = AllReduceMax_Z(M[B, K_Y, G]{U_Z})  (on critical path)
            W[B, K_Y, G, P_Z] = exp(m[B, K_Y, G, P_Z], M[B, K_Y, G])
            Z[B, K_Y, G]{U_Z} = z[B, K_Y, G, P_Z] ·_P W[B, K_Y, G, P_Z]
            Z[B, K_Y, G] = AllReduce_Z(Z[B, K_Y, G]{U_Z})  (on critical path)
            A[B, K_Y, G, H]{U_Z} = a[B, K_Y, G, P_Z, H] ·_P W[B, K_Y, G, P_Z]
            A[B, K_Y, G, H] = AllReduce_Z(A[B, K_Y, G, H]{U_Z})  (on critical path)
            O[B, K_Y, G, H] = divide(A[B, K_Y, G, H], Z[B, K_Y, G])
            Om[B, N_Y, H] = merge(O[B, K_Y, G, H])
            Y[B, D]{U_Y} = Om[B, N_Y, H] ·_NH Wo[N_Y, H, D]
            Y[B, D] = AllReduce_Y(Y[B, D]{U_Y})  (on critical path)""",
        )

    def test_the_combine_is_attention(self) -> None:
        """Four parts on two devices of each row, against softmax as it is defined."""
        sizes = {"B": 2, "N": 8, "K": 4, "G": 2, "H": 2, "P": 4, "S": 3, "D": 3}
        devices, draw = Devices(Mesh({"Y": 2, "Z": 2})), np.random.default_rng(0)
        found, layout = algorithm(FLASH_DECODING, BY_PARTS), FLASH_DECODING.layout(BY_PARTS)
        shapes = {name: FLASH_DECODING.arrays[name] for name in (*FLASH_DECODING.stored, "X")}
        arrays = {name: draw.normal(size=[sizes[d] for d in a.dims]) for name, a in shapes.items()}
        homes = {name: layout.get(name, shape) for name, shape in shapes.items()}
        given = {key(home): devices.place(arrays[name], home) for name, home in homes.items()}
        d_y = FLASH_DECODING.arrays["Y"].replace(name="dY")
        given[key(d_y)] = devices.place(draw.normal(size=(2, 3)), d_y)
        y = simulate(found, devices, sizes, given)[key(FLASH_DECODING.arrays["Y"])]
        q = np.einsum("bd,dnh->bnh", arrays["X"], arrays["Wq"]).reshape(2, 4, 2, 2)
        keys, values = (arrays[name].reshape(2, 12, 4, 2) for name in ("Kc", "Vc"))
        scores = np.exp(np.einsum("bkgh,bskh->bkgs", q, keys))
        o = np.einsum("bkgs,bskh->bkgh", scores / scores.sum(axis=-1, keepdims=True), values)
        for block in y.values():
            np.testing.assert_allclose(
                block, np.einsum("bnh,nhd->bd", o.reshape(2, 8, 2), arrays["Wo"]), rtol=1e-12
            )
