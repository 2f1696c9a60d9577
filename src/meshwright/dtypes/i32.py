"""Integers of 32 bits: tokens, positions and places of rows."""

from meshwright.dtypes.number_type import NumberType

TYPE = NumberType(
    name="i32",
    about="integers of 32 bits",
    bits=32,
    largest=2.0**31 - 1,
    jax="int32",
    hlo=("s32",),
    is_integer=True,
    trained_as=frozenset({"indices"}),
    served_as=frozenset({"indices"}),
)
