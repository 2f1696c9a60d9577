"""NF4, 4-bit NormalFloat: base weights of QLoRA, with a float32 scale for each 64 (no double quantisation).

Source: Dettmers et al., arXiv:2305.14314, appendix E.
"""

from meshwright.dtypes.number_type import NumberType, Scales

TYPE = NumberType(
    name="nf4",
    about="4-bit NormalFloat: 16 quantiles of a normal distribution",
    bits=4,
    largest=1.0,
    jax="uint4",
    levels=(
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    scales=Scales(block=64),
    declared=("bitsandbytes load_in_4bit",),
    planned_as=frozenset({"weights"}),
    trained_as=frozenset({"frozen weights"}),
)
