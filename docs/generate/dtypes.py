"""The number types of layouts, from their records, for the reference."""

from meshwright.dtypes import NUMBER_TYPES, NumberType

_PHASES = {"training": "trained_as", "inference": "served_as", "plans only": "planned_as"}
_KINDS = {"cpu": "CPUs", "gpu": "GPUs", "tpu": "TPUs"}


def text() -> str:
    """A table of all types that arrays of a model may have."""
    rows = [_row(record) for record in NUMBER_TYPES.values() if record.uses - {"indices"}]
    head = f"| type | elements | a scale for | {' | '.join(_PHASES)} | products emulated on |"
    return "\n".join([head, f"|{'---|' * (len(_PHASES) + 4)}", *rows])


def _row(record: NumberType) -> str:
    uses = (", ".join(sorted(getattr(record, name))) for name in _PHASES.values())
    others = f" ({', '.join(record.aliases)})" if record.aliases else ""
    cells = (f"`{record.name}`{others}", record.about, _scales(record), *uses, _emulated(record))
    return f"| {' | '.join(cells)} |"


def _scales(record: NumberType) -> str:
    scales = record.scales
    if scales is None:
        return ""
    kind = NUMBER_TYPES[scales.dtype].about if scales.dtype != "f32" else "float32"
    if scales.block is None:
        return f"a row or tile of operands, an output of weights, a token and head of caches ({kind})"
    square = f", {scales.block} x {scales.block} of a weight" if scales.square else ""
    over = ", under a float32 scale for an operand" if scales.has_global else ""
    return f"{scales.block} numbers along the summed dimension{square} ({kind}{over})"


def _emulated(record: NumberType) -> str:
    kinds = ", ".join(_KINDS[kind] for kind in _KINDS if kind in record.emulated_on)
    if record.capability is None or not kinds:
        return kinds
    return f"{kinds}, except NVIDIA's from compute capability {record.capability:g} on"
