"""IEEE half precision: operands in training, without scales."""

from meshwright.dtypes.number_type import NumberType

TYPE = NumberType(
    name="f16",
    about="IEEE half precision: numbers beyond 65,504 overflow, cotangents under 6e-5 lose bits",
    bits=16,
    largest=65504.0,
    jax="float16",
    hlo=("f16",),
    aliases=("fp16", "float16"),
    safetensors="F16",
    trained_as=frozenset({"operands"}),
)
