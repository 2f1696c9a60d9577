"""bfloat16: float32 without its last 16 bits, the default of chips with matrix units."""

from meshwright.dtypes.number_type import NumberType

TYPE = NumberType(
    name="bf16",
    about="float32 with 8 bits of mantissa",
    bits=16,
    largest=3.3895314e38,
    jax="bfloat16",
    hlo=("bf16",),
    aliases=("bfloat16",),
    safetensors="BF16",
    trained_as=frozenset({"weights", "activations", "gradients", "optimizer state"}),
    served_as=frozenset({"weights", "activations"}),
    planned_as=frozenset({"operands", "cache"}),
    native_operands=frozenset({"bf16", "f32"}),
)
