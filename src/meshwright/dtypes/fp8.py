"""fp8: e4m3, with float32 scales. Micikevicius et al., arXiv:2209.05433."""

from meshwright.dtypes.number_type import NumberType, Scales

TYPE = NumberType(
    name="fp8",
    about="floating point of 8 bits, e4m3",
    bits=8,
    largest=448.0,
    jax="float8_e4m3fn",
    hlo=("f8e4m3fn", "f8e4m3", "f8e4m3fnuz", "f8e4m3b11fnuz", "f8e3m4", "f8e5m2", "f8e5m2fnuz", "f8e8m0fnu"),
    aliases=("e4m3", "float8_e4m3fn", "fp8_e4m3", "float8_e4m3"),
    scales=Scales(),
    safetensors="F8_E4M3",
    compressed_tensors="float-quantized",
    quant_method="fp8",
    declared=("compressed-tensors float 8", "modelopt FP8", "fbgemm_fp8"),
    trained_as=frozenset({"operands", "saved activations", "optimizer state", "frozen weights"}),
    served_as=frozenset({"weights", "operands", "cache"}),
    emulated_on=frozenset({"cpu"}),
)
