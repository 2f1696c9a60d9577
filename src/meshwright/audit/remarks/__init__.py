"""Remarks: findings of an audit and warnings of a compiler, in one form."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Remark:
    """A difference from the plan, a mistake of a program without one, or a compiler's warning.

    kind: of a difference collective, product, dtype, exposure, memory, state, update or elementwise; of a
    mistake its name; of a compiler's warning involuntary_replication or other. tensor, instruction: its
    subject. where: JAX's name of that. change: the remedy; "" if none is known.

    bytes: beyond the plan or unnecessary, sent or held by each device in a step; None if unknown. seconds: of
    these bytes on the links or read from memory, or of unnecessary computation, hidden or exposed. None for
    memory, without hardware, and if device groups follow no mesh axes.
    """

    kind: str
    tensor: str
    what: str
    where: str
    change: str
    bytes: int | None
    seconds: float | None = None
    direction: str = ""
    instruction: str = ""

    def of_plan(self) -> dict:
        """The keys of `findings[]` in `mw audit`."""
        return {
            "kind": self.kind,
            "tensor": self.tensor,
            "direction": self.direction,
            "what": self.what,
            "where": self.where,
            "change": self.change,
            "extra_bytes": self.bytes,
            "extra_seconds": self.seconds,
        }

    def of_compiler(self) -> dict:
        """The keys of `compiler_warnings[]`."""
        return {
            "kind": self.kind,
            "tensor": self.tensor,
            "instruction": self.instruction,
            "what": self.what,
            "where": self.where,
            "change": self.change,
            "bytes": self.bytes,
        }

    def of_program(self) -> dict:
        """The keys of `warnings[]` in `mw audit --hlo`."""
        return {**self.of_compiler(), "seconds": self.seconds}
