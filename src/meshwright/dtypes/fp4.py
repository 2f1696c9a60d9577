"""NVFP4: e2m1 in blocks of 16 with scales in e4m3. NVIDIA, arXiv:2509.25149."""

from meshwright.dtypes.number_type import NumberType, Scales

TYPE = NumberType(
    name="fp4",
    about="NVFP4: floating point of 4 bits, e2m1",
    bits=4,
    largest=6.0,
    jax="float4_e2m1fn",
    hlo=("f4e2m1fn",),
    aliases=("nvfp4",),
    declared=("compressed-tensors float 4", "modelopt NVFP4", "modelopt W4A16_NVFP4"),
    scales=Scales(block=16, dtype="fp8", square=True, has_global=True),
    planned_as=frozenset({"weights"}),
    trained_as=frozenset({"operands"}),
    emulated_on=frozenset({"cpu", "gpu", "tpu"}),
    capability=10.0,
)
