"""int4: weights in inference, with a float32 scale for each group of inputs."""

from meshwright.dtypes.number_type import NumberType, Scales

TYPE = NumberType(
    name="int4",
    about="integers from -7 to 7",
    bits=4,
    largest=7.0,
    jax="int4",
    hlo=("s4", "u4"),
    is_integer=True,
    aliases=("w4a16", "awq", "gptq"),
    scales=Scales(block=32),
    compressed_tensors="pack-quantized",
    declared=("gptq 4", "awq 4", "compressed-tensors int 4"),
    served_as=frozenset({"weights"}),
    trained_as=frozenset({"frozen weights"}),
    planned_as=frozenset({"cache"}),
    tables="int8",
    operands_on=frozenset({"cpu"}),
    operands="int8",
    native_operands=frozenset({"int8", "bf16", "f32"}),
)
