"""int8: symmetric, with float32 scales; products are summed in int32."""

from meshwright.dtypes.number_type import NumberType, Scales

TYPE = NumberType(
    name="int8",
    about="integers from -127 to 127",
    bits=8,
    largest=127.0,
    jax="int8",
    hlo=("s8", "u8"),
    is_integer=True,
    scales=Scales(),
    compressed_tensors="int-quantized",
    declared=("gptq 8", "awq 8", "compressed-tensors int 8", "bitsandbytes load_in_8bit"),
    trained_as=frozenset({"operands", "optimizer state", "frozen weights"}),
    served_as=frozenset({"weights", "operands", "cache"}),
    # In XLA for CPU, widening the weights takes 20 times longer than multiplying them by int8 activations.
    operands_on=frozenset({"cpu"}),
    native_operands=frozenset({"int8", "bf16", "f32"}),
)
