"""What an audit of a program without a plan warns of."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Accident:
    """bytes: what each device sends, or holds, in vain in a step; seconds: the time of that on the links, to
    read it from memory, or of what it computes in vain; None where no hardware was named. change: the cure.
    """

    kind: str
    tensor: str
    instruction: str
    what: str
    where: str
    change: str
    bytes: int
    seconds: float | None

    def to_dict(self) -> dict:
        return asdict(self)
