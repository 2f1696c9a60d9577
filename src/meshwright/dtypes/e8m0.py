"""e8m0: powers of two, the scales of blocks of OCP MX types."""

from meshwright.dtypes.number_type import NumberType

TYPE = NumberType(
    name="e8m0",
    about="powers of two from 2^-127 to 2^127, scales of OCP MX types",
    bits=8,
    largest=2.0**127,
    jax="float8_e8m0fnu",
    safetensors="F8_E8M0",
)
