"""What an audit says of a program, in one form."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Remark:
    """A difference from the plan, an accident of a program without one, or a warning of the compiler.

    kind: of a difference collective, product, dtype, exposure, memory, state, update or elementwise; of an
    accident its name; of the compiler's involuntary_replication, or other. tensor, instruction: what it is
    about. where: JAX's name of it. change: the remedy, "" where none is known.
    bytes: that each device sends, or holds, beyond the plan or in vain in a step; None where unknown.
    seconds: their time on the links, to read them from memory, or of what is computed in vain, hidden or
    exposed; None for memory, without hardware, and where the collective's device groups follow no mesh axes.
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
