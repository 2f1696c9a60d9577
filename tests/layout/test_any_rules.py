"""Any layout: rules drawn at random are derived, priced, written and read back."""

from dataclasses import replace

from hypothesis import given, settings
from tests.layout.any_rules import any_layouts

from meshwright.cost.record import record_training
from meshwright.cost.recorder import PassShape
from meshwright.cost.step_memory import step_memory
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.count import count_params
from meshwright.plan.train import price

CONFIG = ModelConfig(
    name="small", num_layers=2, d_model=64, d_ff=128, num_heads=16, num_kv_heads=8, d_head=16,
    vocab_size=256, max_seq_len=64,
)  # fmt: skip
BATCH = Workload(16, 64)


@settings(max_examples=150, deadline=None)
@given(any_layouts())
def test_they_are_priced(layout: Layout) -> None:
    """The step takes time; its FLOPs are those of one device, shared out, or more where work is repeated."""
    priced = price(CONFIG, load(f"v5e:{layout.mesh.num_devices}"), BATCH, layout)
    alone = price(CONFIG, load("v5e:1"), BATCH, Layout.of(remat=layout.schedule.remat))
    assert priced.cost.executed_flops * layout.mesh.num_devices >= 0.999 * alone.cost.executed_flops
    assert 0 < priced.step_seconds < float("inf")


@settings(max_examples=150, deadline=None)
@given(any_layouts())
def test_memory_is_what_the_tables_store(layout: Layout) -> None:
    """A device holds its share of the weights at least, and at most the whole model."""
    graph = record_training(CONFIG, load("v5e:1"), layout, PassShape.of_microbatch(BATCH, layout))
    memory = step_memory(graph, layout)
    whole = 4 * count_params(CONFIG).total
    assert whole / layout.mesh.num_devices <= memory.weights <= whole
    assert 2 * whole / layout.mesh.num_devices <= memory.optimizer <= 2 * whole


@given(any_layouts())
def test_they_read_back(layout: Layout) -> None:
    assert Layout.from_dict(layout.to_dict()) == layout


@given(any_layouts())
def test_a_short_form_is_found_where_there_is_one(layout: Layout) -> None:
    """Rules over x, y, z have none; the text says so and is not read as one."""
    assert layout.form is None and "rules=own" in str(layout)
    named = Layout.of(data=2, fsdp=2, tensor=2, zero=1, sequence_parallel=True)
    assert str(replace(named, _known_form=None)) == str(named)
