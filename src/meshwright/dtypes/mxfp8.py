"""MXFP8: e4m3 in blocks of 32 with scales in e8m0. OCP Microscaling Formats 1.0, 2023."""

from meshwright.dtypes.number_type import NumberType, Scales

TYPE = NumberType(
    name="mxfp8",
    about="OCP MX: floating point of 8 bits, e4m3",
    bits=8,
    largest=448.0,
    jax="float8_e4m3fn",
    scales=Scales(block=32, dtype="e8m0"),
    trained_as=frozenset({"operands"}),
    emulated_on=frozenset({"cpu", "gpu", "tpu"}),
    capability=10.0,
    priced_as="fp8",
)
