"""Planned products beside those that run: recomputation, a second forward pass, wider types."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshwright.audit.facts.emitted import pass_of
from meshwright.audit.facts.products import Product
from meshwright.audit.hlo.op_names import phase_of, scope_of, split_op_name
from meshwright.audit.hlo.parse import Program
from meshwright.units import dtype_bytes

# (tensor, pass) of a product; a pass is forward, recompute or backward.
Key = tuple[str, str]

# A product of one tensor in one pass may differ by this share of all planned FLOPs; so may attention, whose
# kernels compute whole blocks of scores, by the share of its own.
TOLERANCE = 0.005
ATTENTION_TOLERANCE = 0.35
_PASSES = {"remat": "recompute", "update": "backward"}


@dataclass(frozen=True)
class ProductDifference:
    """FLOPs of one device in a step, of one tensor in one pass, planned and compiled. where: JAX's name."""

    tensor: str
    direction: str
    planned: float
    compiled: float
    where: str
    what: str

    @property
    def extra_flops(self) -> float:
        return self.compiled - self.planned


def compare_products(planned: Mapping[Key, float], found: Iterable[Product]) -> list[ProductDifference]:
    """Those whose FLOPs differ from the plan's, the largest difference first.

    Recomputed products count with the backward pass's: which of both has one is the compiler's choice. A
    product that XLA merged of several counts with the first of its names that the plan has.
    """
    total = sum(planned.values())
    wanted, compiled = _by_pass(planned.items()), defaultdict(float)
    where: dict[Key, Product] = {}
    for product in found:
        key = _key(product, wanted)
        compiled[key] += product.flops
        where.setdefault(key, product)
    differing = []
    for tensor, direction in wanted.keys() | compiled.keys():
        key = tensor, direction
        before, after = wanted.get(key, 0.0), compiled.get(key, 0.0)
        allowed = max(TOLERANCE * total, ATTENTION_TOLERANCE * before if tensor == "attention" else 0.0)
        if abs(after - before) > allowed:
            name = where[key].op_name if key in where else ""
            differing.append(
                ProductDifference(
                    tensor, direction, before, after, name, _words(tensor, direction, before, after)
                )
            )
    return sorted(differing, key=lambda one: -abs(one.extra_flops))


def wider_products(found: Iterable[Product], program: Program, dtype: str, *, widened: bool) -> list[Product]:
    """The products whose operands are wider than `dtype`, in which the plan computes."""
    return [one for one in found if one.bits(program, widened=widened) > 8 * dtype_bytes(dtype)]


def _by_pass(flops: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    total: dict[Key, float] = defaultdict(float)
    for (tensor, direction), count in flops:
        total[tensor, pass_of(direction)] += count
    return dict(total)


def _key(product: Product, wanted: Mapping[Key, float]) -> Key:
    names = split_op_name(product.op_name)
    for name in names:
        direction = pass_of(phase_of(name, differentiated=True))
        for scope in reversed(scope_of(name)):
            if (scope, direction) in wanted:
                return scope, direction
    scopes = scope_of(names[0])
    return scopes[-1] if scopes else names[0], pass_of(phase_of(names[0], differentiated=True))


def _words(tensor: str, direction: str, planned: float, compiled: float) -> str:
    if not planned:
        return f"{tensor}: {compiled:.3g} FLOPs {direction} that are not planned"
    if not compiled:
        return f"{tensor}: {planned:.3g} FLOPs {direction} are planned and not in the program"
    return f"{tensor}: {compiled:.3g} FLOPs {direction}, {compiled / planned:.2f} times the planned {planned:.3g}"
