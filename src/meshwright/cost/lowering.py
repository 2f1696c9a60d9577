"""How a machine's programs run the operations, as far as their work and what they hold depend on it."""

from dataclasses import dataclass

from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.flash import TPU_LANES, has_narrow_values, why_no_flash
from meshwright.layout.runnable import hosts_lack
from meshwright.models.config import ModelConfig


@dataclass(frozen=True)
class Lowering:
    """The forms in which attention, the head and experts run.

    flash_attention: whether no scores lie in memory but those of a block, and hidden blocks are skipped.
    by_blocks: whether that is the work of XLA's operations, from which each block's scores go through memory,
    and not of a kernel. wide_values: whether a kernel takes values as wide as keys, and pads others.
    whole_blocks: whether a kernel computes whole blocks of windows. scores_dtype: of scores that no kernel
    fuses with the products. head_tile: elements that the head dimension of queries, keys and values is padded
    to a multiple of. wide_logits: whether logits that are capped, or made of narrow operands, lie in memory
    as float32, too. head_by_chunks: whether logits are made by chunks of tokens, where the layout lets them.
    static_on: the platform on which a program of static shapes multiplies the rows of experts, in whole
    blocks and with the room of a round; None: of dynamic shapes.
    """

    flash_attention: bool = True
    by_blocks: bool = False
    wide_values: bool = False
    whole_blocks: bool = False
    scores_dtype: str = "f32"
    head_tile: int = 1
    wide_logits: bool = False
    head_by_chunks: bool = False
    static_on: str | None = None


# A flash kernel, and nothing else that is particular to a platform.
FLASH = Lowering()


def training_lowering(
    config: ModelConfig, hardware: Hardware, layout: Layout, *, has_kernel: bool
) -> Lowering:
    """How the hardware's software runs a training step; has_kernel: whether one takes attention."""
    kind, flash = hardware.chip.kind, hardware.software.flash
    kernel_on = kind if flash and has_kernel else None
    return Lowering(
        flash_attention=flash,
        by_blocks=flash and not has_kernel,
        wide_values=kernel_on == "gpu" and has_narrow_values(config),
        whole_blocks=kernel_on == "tpu",
        # Fused softmax kernels of GPUs keep scores in the type of activations, XLA on CPU in float32.
        scores_dtype=layout.precision.compute_dtype if kind == "gpu" else "f32",
        head_tile=TPU_LANES if kernel_on == "tpu" else 1,
        # XLA for GPU makes the gradient of a cap, and keeps it for both products that read it. A product of
        # narrow operands it leaves in float32, in which scales multiply it.
        wide_logits=kind == "gpu" and hardware.software.is_ours,
        head_by_chunks=kind == "cpu",
        static_on=kind if has_static_rows(hardware, layout) else None,
    )


def has_static_rows(hardware: Hardware, layout: Layout) -> bool:
    """Whether the rows of experts have room by the round: in programs of static shapes, which run here.

    Layouts of which nn/ has no program are those of others, whose shapes follow the rows that there are: such
    as stages on several hosts that run programs of their own.
    """
    return hardware.software.static_rows and hosts_lack(layout, hardware.num_hosts) is None


def lacks_kernel(config: ModelConfig, hardware: Hardware, layout: Layout, seq_len: int) -> str | None:
    """Why no kernel takes attention on these chips; None if one does, as of all other software."""
    chip = hardware.chip
    if not hardware.software.is_ours:
        return None
    return why_no_flash(chip.kind, chip.compute_capability, config, layout, seq_len)
