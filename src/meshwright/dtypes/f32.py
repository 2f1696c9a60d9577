"""Float32: sums, norms, scales, master copies, and everything on CPUs."""

from meshwright.dtypes.number_type import NumberType

TYPE = NumberType(
    name="f32",
    about="IEEE single precision",
    bits=32,
    largest=3.4028235e38,
    jax="float32",
    hlo=("f32",),
    aliases=("fp32", "float32"),
    safetensors="F32",
    trained_as=frozenset({"weights", "activations", "gradients", "optimizer state"}),
    served_as=frozenset({"weights", "activations"}),
    planned_as=frozenset({"operands", "cache"}),
    native_operands=frozenset({"f32"}),
)
