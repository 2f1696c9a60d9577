"""The programs that a server compiles before its first request: of steps by their sizes, and of samplers."""

from typing import NamedTuple

from meshwright.layout.attention_kernels import has_prompt_programs, why_no_paged
from meshwright.layout.layout import Layout
from meshwright.layout.layout_checks import num_replicas
from meshwright.layout.page_sizes import DEFAULT_PAGE, chunk_of, compiled_sizes, divided_block, table_widths
from meshwright.models.config import ModelConfig
from meshwright.platforms import Compiler, Platform

# For each sampler: whether it draws at random, filters the tokens to draw from, and reports alternatives.
SAMPLERS = tuple(
    (draws, filters, top)
    for draws, filters in ((False, False), (True, False), (True, True))
    for top in (False, True)
)
_WITH_EDITS = 2  # each sampler is compiled with and without edits of logits


class ServerPrograms(NamedTuple):
    """Numbers of programs. generate: steps of one token a sequence. prompts: steps with prompts."""

    generate: int
    prompts: int
    samplers: int

    def bytes_of(self, generate: float, prompts: float, sampler: float) -> int:
        """Bytes of all programs, from the bytes of one program of each kind."""
        return round(self.generate * generate + self.prompts * prompts + self.samplers * sampler)

    def code_bytes(self, compiler: Compiler, num_layers: int) -> int | None:
        """Planned bytes of the machine code of all programs on a device; None if they are unknown."""
        step, sampler = compiler.step_code_bytes, compiler.sampler_code_bytes
        if step is None or sampler is None:
            return None
        each = step + num_layers * compiler.layer_code_bytes
        return self.bytes_of(each, each, sampler)


def server_programs(
    config: ModelConfig, layout: Layout, platform: Platform, num_slots: int, context: int
) -> ServerPrograms:
    """The programs of `mw serve` for `num_slots` sequences of up to `context` tokens, without drafts.

    Steps are compiled for 1, 2, 4, ... sequences of a replica and for 1, 2, 4, ... blocks of a chunk of a
    prompt. Steps that read whole tables of pages are also compiled for short tables.
    """
    at = layout.at("generate")
    replicas = num_replicas(at, config)
    slots = max(1, num_slots // replicas)
    widths = [0]
    if not platform.page_by_page and why_no_paged(platform, config, at) is not None:
        widths += table_widths(-(-context // DEFAULT_PAGE))
    # All devices of a shard of the batch compute the chunks of all of its replicas.
    chunk = max(1, chunk_of(layout, context) // (replicas // at.num_batch_shards))
    block = min(
        divided_block(platform.prompt_rows, layout.num_prompt_shards), 1 << (context - 1).bit_length()
    )
    blocks = compiled_sizes(min(-(-chunk // block), -(-context // block)))
    heads = len({1, slots})
    samplers = heads * _WITH_EDITS * (1 if platform.one_sampler else len(SAMPLERS))
    return ServerPrograms(
        len(compiled_sizes(slots)) * len(widths),
        len(blocks) * (1 + has_prompt_programs(platform, layout)),
        samplers,
    )
