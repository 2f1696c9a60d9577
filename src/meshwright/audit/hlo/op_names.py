"""What JAX's `op_name` of an instruction says: pass, named scopes and primitive.

Seen in JAX 0.10.2, and with `eval_jaxpr` for `closed_call` in 0.12, for `with named_scope("mlp"),
named_scope("w_in"):` around `einsum("BTD,DF->BTF")`:

    jit(step)/jvp(mlp)/w_in/BTD,DF->BTF/dot_general                     forward of a gradient
    jit(step)/transpose(jvp(mlp))/w_in/BTD,DF->BTF/dot_general          backward
    jit(step)/jvp()/while/body/closed_call/mlp/w_in/reshard             forward, in a scan
    jit(step)/transpose(jvp())/while/body/closed_call/checkpoint/rematted_computation/mlp/w_in/reshard
    jit(step)/transpose(jvp())/while/body/closed_call/checkpoint/mlp/(w_in/dot_general:w_out/dot_general)

The last is two instructions that XLA combined.
"""

import re
from collections.abc import Collection, Iterable
from typing import Literal

from meshwright.models.scopes import BACKWARD, at_most_blocks

PassName = Literal["forward", "backward", "remat", "update"]

# The scope of operations on complete gradients, which are summed over microbatches.
GRADIENTS = "gradients"
# The scope of a pipeline's forward pass outside of differentiated code: embedding, hops.
_FORWARD = "forward"

# Both scopes, also inside a transformation: vmap(forward).
_OF_BACKWARD = re.compile(rf"[/(]({GRADIENTS}|{BACKWARD})[/)]")
_OF_FORWARD = re.compile(rf"[/(]{_FORWARD}[/)]")

# How many of some blocks are met: numbers of them, and of all.
OF_BLOCKS = re.compile(at_most_blocks(0, 0).replace("0", r"(\d+)"))
# JAX's scope of the calls of splash attention, and our scope of all attention.
_SPLASH, _ATTENTION = "static_sparsity_splash", "attention"
_KEY = re.compile(r"\['(\w+)'\]")

_WRAPPED = re.compile(r"(jvp|transpose|vmap|checkpoint|remat)\((.*)\)")
_MACHINERY = {
    "while", "body", "cond", "closed_call", "eval_jaxpr", "checkpoint", "rematted_computation",
    "remat", "remat2", "shard_map", "pjit", "core_call", "custom_jvp_call", "custom_vjp_call", "scan",
}  # fmt: skip


def phase_of(op_name: str, differentiated: bool) -> PassName:
    """The pass that an instruction belongs to.

    differentiated: the program holds a gradient, so operations outside of it are the update.

    >>> phase_of("jit(f)/transpose(jvp())/while/body/checkpoint/rematted_computation/mlp/mul", True)
    'remat'
    """
    if "rematted_computation" in op_name:
        return "remat"
    if "transpose(" in op_name or _OF_BACKWARD.search(op_name):
        return "backward"
    is_forward = not differentiated or not op_name or "jvp(" in op_name or _OF_FORWARD.search(op_name)
    return "forward" if is_forward else "update"


def scope_of(op_name: str) -> tuple[str, ...]:
    """The user's named scopes, outermost first, without JAX's own words, counts of blocks and the primitive.

    >>> scope_of("jit(step)/transpose(jvp(mlp))/w_in/BTD,DF->BTF/dot_general")
    ('mlp', 'w_in', 'BTD,DF->BTF')
    >>> scope_of("jit(step)/jvp(attention)/at_most_3_of_4_blocks/cond/k/dot_general")
    ('attention', 'k')

    The calls of splash attention in JAX 0.11.2 have no scope of the caller.

    >>> scope_of("jvp(vmap(static_sparsity_splash))/splash_mha_fwd/pallas_call")
    ('attention', 'static_sparsity_splash', 'splash_mha_fwd')
    """
    named = (name for part in _parts(op_name)[:-1] for name in _scopes_in(part))
    scopes = tuple(name for name in named if not OF_BLOCKS.fullmatch(name))
    return (_ATTENTION, *scopes) if scopes[:1] == (_SPLASH,) else scopes


def is_of(op_name: str, operations: Collection[str]) -> bool:
    """Whether a scope is one of the operations, or begins one: `dispatch`, of `dispatch_sort`.

    >>> is_of("jit(f)/jvp(mlp)/dispatch/sort", ["dispatch_sort"]), is_of("jit(f)/sort", ["dispatch"])
    (True, False)
    """
    scopes = scope_of(op_name)
    return any(begins_or_is(one, scopes) for one in operations)


def begins_or_is(operation: str, scopes: Iterable[str]) -> bool:
    """Whether one of the scopes is the operation, or begins its name.

    >>> begins_or_is("dispatch_sort", ["mlp", "dispatch"])
    True
    """
    return any(operation == scope or operation.startswith(f"{scope}_") for scope in scopes)


def primitive_of(op_name: str) -> str:
    """The last part: the JAX primitive (dot_general, reshard, psum) that was lowered.

    >>> primitive_of("jit(step)/jvp(mlp)/w_in/reshard")
    'reshard'
    """
    return _parts(op_name)[-1] if op_name else ""


def is_written_by_hand(op_name: str) -> bool:
    """Whether an operation is in the body of a shard_map, where shapes are those of one device.

    >>> is_written_by_hand("jit(f)/shard_map/dot_general"), is_written_by_hand("jit(f)/shard_map")
    (True, False)
    """
    return "shard_map" in _parts(op_name)[:-1]


def is_of_call(op_name: str) -> bool:
    """Whether it names a whole call or loop, and not an operation within it.

    >>> is_of_call("jit(step)/jvp(layers)/while/body/remat2"), is_of_call("jit(step)/jvp(layers)/mul")
    (True, False)
    """
    primitive = primitive_of(op_name)
    return primitive in _MACHINERY or re.fullmatch(r"p?jit(\(.*)?", primitive) is not None


def keys_of(op_name: str) -> list[str]:
    """The keys of an input that is part of a dictionary.

    >>> keys_of("state.params['layers']['wq']")
    ['layers', 'wq']
    """
    return _KEY.findall(op_name)


def renamed(op_name: str, scope: str) -> str:
    """An op_name of the same pass and loop, with another scope.

    >>> renamed("jit(f)/jvp(layers)/while/body/closed_call/mlp/add", "w_in")
    'jit(f)/jvp(layers)/while/body/closed_call/w_in/add'
    """
    parts = _parts(op_name)
    inside = max(
        (place + 1 for place, part in enumerate(parts) if part in _MACHINERY), default=len(parts) - 1
    )
    return "/".join([*parts[:inside], scope, parts[-1]])


def split_op_name(op_name: str) -> list[str]:
    """The op_names that XLA merged into one, `prefix/(a:b)`; the name itself if it is one.

    >>> split_op_name("jit(f)/mlp/(w_in/dot_general:w_out/dot_general)")
    ['jit(f)/mlp/w_in/dot_general', 'jit(f)/mlp/w_out/dot_general']
    """
    prefix, separator, merged = op_name.partition("/(")
    if not separator or not merged.endswith(")"):
        return [op_name]
    return [f"{prefix}/{part}" for part in _split_outside(merged[:-1], ":")]


def _parts(op_name: str) -> list[str]:
    return _split_outside(op_name, "/")


def _split_outside(text: str, separator: str) -> list[str]:
    """`text` cut at `separator` where no parenthesis is open."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _scopes_in(part: str) -> list[str]:
    wrapped = _WRAPPED.fullmatch(part)
    if wrapped:
        return [name for inner in _parts(wrapped[2]) for name in _scopes_in(inner)]
    is_machinery = not part or part in _MACHINERY or part.startswith(("jit(", "pjit(", "branch_"))
    return [] if is_machinery else [part]
