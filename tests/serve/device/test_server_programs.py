"""The planned number of a server's programs is that of its runner."""

import pytest

from meshwright.layout import Layout
from meshwright.layout.attention_kernels import has_prompt_programs, why_no_paged
from meshwright.layout.server_programs import server_programs
from meshwright.models.presets import load_model
from meshwright.platforms import CPU, GPU, TPU, Platform
from meshwright.serve.device.sampling import Needs
from meshwright.serve.device.shapes import Shapes
from meshwright.serve.engine.limits import Limits


@pytest.mark.parametrize("platform", [CPU, GPU, TPU], ids=lambda platform: platform.name)
@pytest.mark.parametrize(
    ("layout", "num_slots", "context"),
    [
        ("tensor=2", 64, 4096),
        ("data=2,tensor=2", 48, 1000),
        ("fsdp=2,tensor=4", 8, 8192),
        ("data=8", 8, 100),
    ],
)
@pytest.mark.parametrize("model", ["llama-3-8b", "gemma-2-2b"])
def test_the_number_of_programs_is_the_runner_s(
    model: str, layout: str, num_slots: int, context: int, platform: Platform
) -> None:
    config, at = load_model(model), Layout.parse(layout)
    limits = Limits.of_layout(config, at.at("generate"), platform, num_slots, context)
    shapes = Shapes(
        limits,
        num_drafts=0,
        has_fresh=has_prompt_programs(platform, at.at("generate")),
        num_sharing=1,
        reads_whole_tables=lambda queries: (
            not platform.page_by_page
            and why_no_paged(platform, config, at.at("generate"), queries) is not None
        ),
    )
    counted = server_programs(config, at, platform, num_slots, context)
    assert counted.generate == sum(not shape.blocks + shape.fresh for shape in shapes.all)
    assert counted.prompts == sum(bool(shape.blocks + shape.fresh) for shape in shapes.all)
    needs = 1 if platform.one_sampler else len(Needs.all())
    heads = {1, limits.slots_per_replica}
    assert counted.samplers == len(heads) * needs * 2
