"""MXFP4: weights of published checkpoints. OCP Microscaling Formats 1.0, 2023."""

from meshwright.dtypes.number_type import NumberType, Scales

TYPE = NumberType(
    name="mxfp4",
    about="OCP MX: floating point of 4 bits, e2m1",
    bits=4,
    largest=6.0,
    jax="float4_e2m1fn",
    scales=Scales(block=32, dtype="e8m0"),
    quant_method="mxfp4",
    of_experts=True,
    planned_as=frozenset({"weights"}),
    # Multiplied by activations in 8 bits.
    capability=10.0,
    priced_as="fp8",
)
