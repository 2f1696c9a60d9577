"""e5m2: gradients of other programs, and checkpoints. Micikevicius et al., arXiv:2209.05433.

No use in layouts: scales cover its wider range, and cuBLAS does not multiply two operands in it.
"""

from meshwright.dtypes.number_type import NumberType, Scales

TYPE = NumberType(
    name="e5m2",
    about="floating point of 8 bits, e5m2",
    bits=8,
    largest=57344.0,
    jax="float8_e5m2",
    hlo=("f8e5m2", "f8e5m2fnuz"),
    aliases=("float8_e5m2", "fp8_e5m2"),
    scales=Scales(),
    safetensors="F8_E5M2",
)
