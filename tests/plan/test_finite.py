"""Whatever is priced, on ideal links or the catalog's: no figure is NaN, infinite or negative."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import isfinite
from typing import TypeVar

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.hardware.catalog import load
from meshwright.hardware.topology import Hardware
from meshwright.layout import REMATS, Layout
from meshwright.layout.pipelines import SCHEDULES
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.config_tables import MLA, MoE
from meshwright.plan.candidate import Candidate
from meshwright.plan.explain.explanation import explain
from meshwright.plan.train import price, search

MACHINES = ["v5p:2x2x4", "v5e:4x4", "2*v5e:2x4", "h100:2x8", "gb200-nvl72:16", "a100-40gb:4x4"]
T = TypeVar("T")
ONE_CHIP = ["v5p:1x1x1", "v5e:1x1", "h100:1", "gb200-nvl72:1", "cpu:1"]
SEQUENCES = st.sampled_from([1, 7, 16, 100, 2048])
SIXTEEN = st.sampled_from(MACHINES)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Dense, gated or not, with experts, with latent attention, with windows."""
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
    config = ModelConfig(
        name="drawn",
        num_layers=draw(st.integers(1, 48)),
        d_model=draw(st.sampled_from([64, 512, 1000, 4096])),
        d_ff=draw(st.sampled_from([128, 1536, 11_008])),
        num_heads=heads,
        num_kv_heads=kv_heads,
        d_head=draw(st.sampled_from([16, 64, 128])),
        vocab_size=draw(st.sampled_from([257, 32_000, 128_256])),
        max_seq_len=65_536,
        tied_embeddings=draw(st.booleans()),
        gated=draw(st.booleans()),
        norm=draw(st.sampled_from(["rms", "layer"])),
    )
    kind = draw(st.sampled_from(["dense", "experts", "latent"]))
    if kind == "experts":
        moe = MoE(8, draw(st.integers(1, 8)), 256, num_shared_experts=draw(st.integers(0, 2)))
        return replace(config, moe=moe)
    if kind == "latent":
        mla = MLA(
            q_rank=draw(st.sampled_from([None, 64])), kv_rank=64, nope_dim=32, rope_dim=16, value_dim=32
        )
        return replace(config, mla=mla, num_kv_heads=heads, d_head=48)
    return config


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    degrees = dict.fromkeys(("pipe", "data", "fsdp", "context", "tensor"), 1)
    left = 16
    for axis in draw(st.permutations(list(degrees))):
        degrees[axis] = draw(st.sampled_from([d for d in (1, 2, 4, 8, 16) if d <= left]))
        left //= degrees[axis]
    degrees["data"] *= left
    rest = {
        "microbatches": draw(st.sampled_from([1, 2, 3, 8, 64])),
        "remat": draw(st.sampled_from(REMATS)),
        "sequence_parallel": draw(st.booleans()),
        "offload": draw(st.booleans()),
        "expert": draw(st.sampled_from([1, 2, 8])),
    }
    if degrees["pipe"] > 1:
        rest["schedule"] = draw(st.sampled_from(list(SCHEDULES)))
    try:
        return Layout.of(**degrees, **rest)
    except MeshwrightError:
        assume(False)
        raise


def numbers(document: object) -> Iterator[float]:
    """Every number in a document."""
    if isinstance(document, dict):
        for value in document.values():
            yield from numbers(value)
    elif isinstance(document, list | tuple):
        for value in document:
            yield from numbers(value)
    elif isinstance(document, int | float) and not isinstance(document, bool):
        yield document


def check(candidate: Candidate) -> None:
    document = candidate.to_dict()
    json.dumps(document, allow_nan=False)
    assert all(isfinite(number) and number >= 0 for number in numbers(document))
    assert candidate.step_seconds > 0 and candidate.memory.total > 0
    assert 0 < candidate.mfu <= candidate.hfu * (1 + 1e-9) <= 1 + 1e-6
    assert all(term.seconds >= 0 for term in candidate.cost.terms)
    assert all(p.seconds >= 0 and 0 <= p.exposed <= 1 for p in candidate.cost.collectives)


def outcome(make: Callable[[], T]) -> tuple[T | None, str]:
    """What `make` returns, or the message with which it refuses."""
    try:
        return make(), ""
    except MeshwrightError as error:
        return None, str(error)


def machine(spec: str, ideal: bool) -> Hardware:
    return load(spec).ideal() if ideal else load(spec)


@given(configs(), layouts(), SIXTEEN, st.booleans(), SEQUENCES, st.sampled_from([64, 1000, 8192]))
@settings(max_examples=120, deadline=None)
def test_a_price_is_finite_or_refused_in_one_line(
    config: ModelConfig, layout: Layout, spec: str, ideal: bool, num_sequences: int, seq_len: int
) -> None:
    layout = layout if config.moe else layout.replace(expert=1)
    candidate, refused = outcome(
        lambda: price(config, machine(spec, ideal), Workload(num_sequences, seq_len), layout)
    )
    assert "\n" not in refused
    if candidate:
        check(candidate)


@given(configs(), SIXTEEN, st.booleans(), st.integers(1, 64))
@settings(max_examples=2, deadline=None)
def test_a_search_and_what_is_said_of_it_are_finite(
    config: ModelConfig, spec: str, ideal: bool, num_sequences: int
) -> None:
    hardware, workload = machine(spec, ideal), Workload(num_sequences, 1024)
    found, refused = outcome(
        lambda: search(config, hardware, workload, weights_dtype="bf16", compute_dtypes=("bf16",))
    )
    assert "\n" not in refused
    if found is None:
        return
    for candidate in found.candidates[:5]:
        check(candidate)
    said = explain(config, hardware, found, num_tokens=10**10, critical_tokens=10**6).to_dict()
    json.dumps(said, allow_nan=False)
    differences = ("slower", "extra_seconds")  # of one layout to another: may be negative
    for one in said["rejected"]:  # pyright: ignore[reportGeneralTypeIssues]
        one["numbers"] = {key: value for key, value in one["numbers"].items() if key not in differences}
    assert all(isfinite(number) and number >= 0 for number in numbers(said))


@pytest.mark.parametrize("spec", ONE_CHIP)
def test_the_smallest_work_is_finite_too(spec: str) -> None:
    config = ModelConfig("one", 1, 2, 1, 1, 1, 2, 2, 1)
    check(price(config, load(spec), Workload(1, 1), Layout.of()))
