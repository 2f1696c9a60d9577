"""Planned and compiled products: recomputation, a second forward pass, wider types."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from meshwright.audit.facts.emitted import UPDATE, pass_of
from meshwright.audit.facts.instruction_work import is_attention_kernel
from meshwright.audit.facts.matmuls import Product
from meshwright.audit.hlo.op_names import phase_of, scope_of, split_op_name
from meshwright.audit.hlo.read import Program
from meshwright.dtypes import dtype_bytes

# (tensor, pass) of a product; a pass is forward, recompute or backward.
_Key = tuple[str, str]

# A product of one tensor in one pass may differ by TOLERANCE of all planned FLOPs. An attention kernel
# computes whole blocks of scores, so it may differ by ATTENTION_TOLERANCE of its own FLOPs. Without a kernel
# XLA may drop that share, because two passes compute the same scores.
TOLERANCE = 0.005
ATTENTION_TOLERANCE = 0.35
# Differences of merged products cancel within this share: plans have fractions of FLOPs, programs whole ones.
_SAME = 0.001


@dataclass(frozen=True)
class ProductDifference:
    """Planned and compiled FLOPs of one tensor in one pass.

    planned, compiled: FLOPs per device and step. where: JAX's name of the product. repeated: the part
    of `compiled` in products that the compiler computes again to save memory.
    """

    tensor: str
    direction: str
    planned: float
    compiled: float
    where: str
    repeated: float = 0.0

    @property
    def extra_flops(self) -> float:
        return self.compiled - self.planned

    @property
    def what(self) -> str:
        if not self.planned:
            return f"{self.tensor}: {self.compiled:.3g} {self.direction} FLOPs that the plan does not have"
        if not self.compiled:
            return f"{self.tensor}: {self.planned:.3g} {self.direction} FLOPs are planned, none are compiled"
        times = f"{self.compiled / self.planned:.2f} times the planned {self.planned:.3g}"
        return f"{self.tensor}: {self.compiled:.3g} {self.direction} FLOPs, {times}"


def compare_products(
    planned: Mapping[_Key, float],
    products: Iterable[Product],
    *,
    differentiated: bool,
    edge: float = 0.0,
    summed: Collection[str] = (),
    same_input: Iterable[frozenset[str]] = (),
) -> list[ProductDifference]:
    """The products whose FLOPs differ from the plan's, the largest difference first.

    edge: share of extra scores that an attention kernel computes in blocks at the mask's edge.
    differentiated: the program holds a gradient. Recomputed products count in the backward pass, since the
    compiler chooses one of the two passes for them. summed: tensors whose products may be missing, since
    the program has sums in their place. same_input: sets of tensors that multiply the same array.
    """
    total = sum(planned.values())
    wanted = _by_pass(planned.items())
    compiled: dict[_Key, float] = defaultdict(float)
    repeated: dict[_Key, float] = defaultdict(float)
    where: dict[_Key, str] = {}
    by_kernels: set[_Key] = set()
    for product in products:
        key = _key(product, wanted, differentiated)
        compiled[key] += product.flops
        repeated[key] += product.flops if product.is_repeated else 0
        where.setdefault(key, product.op_name)
        by_kernels |= {key} if is_attention_kernel(product.value.instruction) else set()
    tolerance = max(ATTENTION_TOLERANCE, edge)
    keys = wanted.keys() | compiled.keys()
    differences = {key: compiled.get(key, 0.0) - wanted.get(key, 0.0) for key in keys}
    differing = [
        ProductDifference(
            *key, wanted.get(key, 0.0), compiled.get(key, 0.0), where.get(key, ""), repeated.get(key, 0.0)
        )
        for key, extra in _without_merged(differences, same_input).items()
        if abs(extra) > max(TOLERANCE * total, tolerance * _of_attention(key, wanted, extra, by_kernels))
        and not (extra < 0 and key[0] in summed)
    ]
    return sorted(differing, key=lambda difference: -abs(difference.extra_flops))


def _of_attention(
    key: _Key, wanted: Mapping[_Key, float], extra: float, by_kernels: Collection[_Key]
) -> float:
    """Planned FLOPs of attention, which has its own tolerance; 0 for other products."""
    return wanted.get(key, 0.0) if key in by_kernels or (key[0] == "attention" and extra < 0) else 0.0


def _without_merged(
    differences: Mapping[_Key, float], same_input: Iterable[frozenset[str]]
) -> dict[_Key, float]:
    """Drop differences that cancel because XLA for GPU merges products of the same input.

    A merged product has the name of one tensor, which then has too many FLOPs, and the others of the same
    pass have too few. When XLA recomputes a merged product it may merge other tensors, so the FLOPs of all
    tensors of an input are compared together.
    """
    left = {key: extra for key, extra in differences.items() if extra}
    for tensors in same_input:
        for direction in {key[1] for key in left if key[0] in tensors}:
            merged = {key: extra for key, extra in left.items() if key[0] in tensors and key[1] == direction}
            surplus = sum(extra for extra in merged.values() if extra > 0)
            if abs(sum(merged.values())) < _SAME * surplus:
                left = {key: extra for key, extra in left.items() if key not in merged}
    return left


def wider_products(
    products: Iterable[Product],
    program: Program,
    dtype: str,
    attention_dtype: str,
    *,
    widened: bool,
    differentiated: bool,
) -> list[Product]:
    """The products with operands wider than planned.

    dtype: the planned type; attention_dtype: the planned type of attention's products. Not checked are the
    optimizer's products and the gradients of scores, which may be float32. Attention's forward products are
    checked only in training steps of XLA:CPU: other compilers omit casts within a fusion or run a kernel, and
    CPUs attend over pages in float32.
    """

    def planned_dtype(product: Product) -> str | None:
        if differentiated and phase_of(product.op_name, differentiated=True) == UPDATE:
            return None
        if "attention" not in scope_of(product.op_name):
            return dtype
        is_forward = phase_of(product.op_name, differentiated=False) == "forward"
        return attention_dtype if widened and is_forward and differentiated else None

    return [
        product
        for product in products
        if (planned := planned_dtype(product))
        and product.bits(program, widened=widened) > 8 * dtype_bytes(planned)
    ]


def _by_pass(flops: Iterable[tuple[_Key, float]]) -> dict[_Key, float]:
    total: dict[_Key, float] = defaultdict(float)
    for (tensor, direction), count in flops:
        total[tensor, pass_of(direction)] += count
    return dict(total)


def _key(product: Product, wanted: Mapping[_Key, float], differentiated: bool) -> _Key:
    names = split_op_name(product.op_name)
    for name in names:
        direction = pass_of(phase_of(name, differentiated))
        for scope in reversed(scope_of(name)):
            if (scope, direction) in wanted:
                return scope, direction
    scopes = [scope for scope in scope_of(names[0]) if "->" not in scope]  # an einsum is no name
    return scopes[-1] if scopes else names[0], pass_of(phase_of(names[0], differentiated))
