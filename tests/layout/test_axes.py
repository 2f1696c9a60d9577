"""The records of the axes: the tables that each adds, the degrees that each tries."""

from dataclasses import replace

import pytest

from meshwright.errors import LayoutError
from meshwright.hardware import catalog
from meshwright.layout import DEGREES, Layout
from meshwright.layout.axes import AXES, Ask
from meshwright.layout.axes.kv_replicas import KV_REPLICAS
from meshwright.layout.layout_checks import check_fits
from meshwright.layout.moves.attention import attention_layout, gathered_keys, token_sharding
from meshwright.layout.short import OPTIONS
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan.train import price
from meshwright.units import divisors

LLAMA = load_model("llama-3-8b")  # D4096 F14336 N32 K8 H128 V128256
BATCH = Workload(512, 8192)
PLAIN = dict.fromkeys(DEGREES, 1) | {name: option.default for name, option in OPTIONS.items()}


def tried(name: str, chips: int, **form: object) -> list[dict[str, object]]:
    """What a search tries of an axis on so many chips, after the words in `form`."""
    axis = next(axis for axis in AXES if axis.name == name)
    return list(axis.choices(Ask(LLAMA, BATCH, chips), PLAIN | form))


def test_every_axis_is_searched_and_has_words() -> None:
    assert sorted(axis.turn for axis in AXES) == list(range(len(AXES))) and [
        axis.name for axis in AXES
    ] == list(DEGREES)
    layout = Layout.of(data=2, fsdp=2, tensor=2)
    for axis in AXES:
        assert axis.words(LLAMA, BATCH, layout.words, layout.schedule)


def test_the_degrees_of_a_search_divide() -> None:
    assert [words["tensor"] for words in tried("tensor", 16)] == [1, 2, 4, 8]
    assert [words["context"] for words in tried("context", 32)] == [1, 2, 4, 8, 16]
    assert tried("data", 1024) == [] and tried("data", 512) == [{"data": 512}]


def test_weights_may_be_shared_over_the_pieces_of_a_sequence_too() -> None:
    found = tried("fsdp", 4, context=8)
    assert {"fsdp": 4, "zero_context": True} in found and {"fsdp": 1, "zero": 1} in found
    assert {"fsdp": 1, "zero": 3, "zero_context": True} in tried("fsdp", 1, context=8)
    assert not any("zero_context" in words for words in tried("fsdp", 4))


def test_fsdp_pads_the_model_dimension_a_little() -> None:
    """8,960 chips are 35 x 256: with D = 4,096 padded by at most a tenth fsdp may be more than 256."""
    degrees = [words["fsdp"] for words in tried("fsdp", 8960)]
    assert {256, 2240, 4480} <= set(degrees)
    assert all(-4096 % degree / 4096 <= 0.1 for degree in degrees if isinstance(degree, int))
    padded = Layout.of(fsdp=448, tensor=2)
    check_fits(padded, LLAMA, padded=True)
    with pytest.raises(LayoutError, match=r"4096 model dimension \(D\) do not divide over fsdp = 448"):
        check_fits(padded, LLAMA)


class TestUlysses:
    LAYOUT = Layout.of(context=2, tensor=4, context_method="ulysses")

    def test_heads_are_exchanged_for_positions_where_queries_meet_keys_alone(self) -> None:
        assert str(self.LAYOUT.activation("q", "BTNH")) == "q[B, T_context, N_tensor, H]"
        assert str(attention_layout(self.LAYOUT).activation("q", "BTNH")) == "q[B, T, N_{tensor,context}, H]"
        assert str(token_sharding(self.LAYOUT, "tokens")) == "tokens[B, T_context]"
        assert attention_layout(Layout.of(context=2)) == Layout.of(context=2)

    def test_its_rules_are_data(self) -> None:
        again = Layout.from_dict(self.LAYOUT.to_dict())
        assert (again, str(again)) == (self.LAYOUT, str(self.LAYOUT))

    def test_kv_heads_must_divide(self) -> None:
        check_fits(self.LAYOUT, LLAMA)
        with pytest.raises(LayoutError, match=r"8 KV heads \(K\) do not divide over tensor·context = 16"):
            check_fits(self.LAYOUT.replace(context=4), LLAMA)
        with pytest.raises(LayoutError, match="but kv_replicas = 2 copies"):
            self.LAYOUT.replace(kv_replicas=2)


class TestKvReplicas:
    LAYOUT = Layout.of(tensor=8, kv_replicas=2, data=2)

    def test_queries_are_split_further_than_keys(self) -> None:
        written = [
            *(self.LAYOUT.weight(name, letters) for name, letters in (("wq", "DNH"), ("wk", "DKH"))),
            *(self.LAYOUT.activation("q", letters) for letters in ("BTNH", "BTKGH", "BTKH")),
        ]
        assert list(map(str, written)) == [
            "wq[D, N_{tensor,kv_replicas}, H]",
            "wk[D, K_tensor, H]",
            "q[B_data, T, N_{tensor,kv_replicas}, H]",
            "q[B_data, T, K_tensor, G_kv_replicas, H]",
            "q[B_data, T, K_tensor, H]",
        ]

    def test_the_cotangent_of_a_key_is_a_sum_over_the_replicas(self) -> None:
        assert str(gathered_keys(self.LAYOUT, "k").yielded) == "dk[B_data, T, K_tensor, H]{U_kv_replicas}"

    def test_a_device_shares_one_head(self) -> None:
        check_fits(self.LAYOUT, LLAMA)
        with pytest.raises(LayoutError) as caught:
            check_fits(Layout.of(tensor=4, kv_replicas=2), LLAMA)
        assert str(caught.value) == (
            "k[B, T, K_tensor, H]: kv_replicas = 2 needs one KV head a device, and 8 KV heads (K) are "
            "split over tensor = 4; fits: tensor=8"
        )

    def test_a_search_tries_them_where_every_head_has_a_device(self) -> None:
        two_heads = replace(LLAMA, num_kv_heads=2)
        ask = Ask(two_heads, BATCH, 4)
        assert list(KV_REPLICAS.choices(ask, PLAIN | {"tensor": 2})) == [
            {"kv_replicas": degree} for degree in (1, 2, 4)
        ]
        assert list(KV_REPLICAS.choices(ask, PLAIN)) == [{"kv_replicas": 1}]
        assert tried("kv_replicas", 8, tensor=8) == [{"kv_replicas": 1}, {"kv_replicas": 2}]


def test_divisors() -> None:
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


def test_a_folded_expert_group_takes_near_devices_first() -> None:
    """As in Megatron-Core: the experts of a device are whole, and the group lies on one node."""
    plain = Layout.of(data=8, context=2, tensor=4, expert=8)
    folded = Layout.of(data=8, context=2, tensor=4, expert=8, fold=True)
    assert plain.table.axes_of("E") == ("expert",) and plain.mesh.sizes["data"] == 1
    assert folded.table.axes_of("E") == ("tensor", "context") and folded.mesh.sizes["data"] == 8
    assert Layout.parse(str(folded)) == folded and "fold=true" in str(folded)
    config, machine = load_model("mixtral-8x22b"), catalog.load("h100:8x8")
    workload = Workload(64, 8192)
    seconds = [price(config, machine, workload, layout).step_seconds for layout in (plain, folded)]
    assert seconds[1] < 0.95 * seconds[0]
