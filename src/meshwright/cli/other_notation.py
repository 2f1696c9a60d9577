"""Sharded products and collectives as other texts write them, translated to the notation of mw."""

import re
from collections.abc import Sequence
from itertools import pairwise
from math import prod

from meshwright.errors import plain_name

# The sign of a product. The book adds the contracted dimension: In[B, D] *D W[D, F].
_JOINED = re.compile(
    r"\]\s*(?:[*@x\u00d7\u00b7\u2217.](?:_?\{?[A-Z]\}?(?=\s))?|,|matmul)?\s*(?=[A-Za-z]\w*\[)"
)
_ARROW = re.compile(r"\s*(?:=>|\u2192|->)\s*")
_EINSUM = re.compile(r"\s*([A-Za-z]+)\s*,\s*([A-Za-z]+)\s*->\s*([A-Za-z]+)\s*")
_QUOTED = re.compile(
    r"['\"]\s*([a-z]+)\s*,\s*([a-z]+)\s*->\s*([a-z]+)\s*['\"]"
)  # jnp.einsum('ij,jk->ik', ...)
_ARRAY = re.compile(r"\[([^\]]*)\](\{[^}]*\})?")
# A collective with its axis as an argument: AllGather([B_X, D], X), psum(x[B]{U_X}, axis_name="X").
_AXIS_LAST = re.compile(r"^\s*([A-Za-z]+)\((.*\](?:\{[^}]*\})?)\s*,\s*(?:axis\w*=)?['\"]?([A-Z])['\"]?\s*\)$")
# Collectives, by their names in other programs without punctuation.
_OPS = {
    **dict.fromkeys(("allgather", "gather"), "AllGather"),
    **dict.fromkeys(("reducescatter", "psumscatter", "scatter"), "ReduceScatter"),
    **dict.fromkeys(("allreduce", "psum", "pmean", "allsum"), "AllReduce"),
    **dict.fromkeys(("alltoall", "a2a"), "AllToAll"),
}
AXES = "XYZ"  # of meshes in the notation
# Words for a matmul, its sizes in options, and sizes as people write them: 512x4096x4096, [512, 4096].
_MATMULS = {"matmul", "matmuls", "gemm", "gemms", "mm", "dot", "linear"}
_ROOFLINES = {"roofline", "rooflines", "intensity"}
_SIZES = {"--m": "I", "--k": "J", "--n": "K"}
_THREE = re.compile(r"([1-9]\d*)\s*[x,*]\s*([1-9]\d*)\s*[x,*]\s*([1-9]\d*)", re.I)
_TWO = r"[\[(]?\s*([1-9]\d*)\s*[x,]\s*([1-9]\d*)\s*[\])]?"
_PAIRS = re.compile(rf"{_TWO}\s*(?:@|\*|x|\.|by|times|,|\s)\s*{_TWO}", re.I)


def is_collective(word: str) -> bool:
    """Whether a word is the name of a collective, in any spelling.

    >>> is_collective("all-reduce"), is_collective("AllGather_X"), is_collective("scatterplot")
    (True, True, False)
    """
    return bool({plain_name(word), plain_name(word.partition("_")[0])} & _OPS.keys())


def _op_of(plain: str) -> str:
    """The collective whose name a plain name begins with; empty if there is none."""
    return next((ours for theirs, ours in _OPS.items() if plain.startswith(theirs)), "")


def expression_here(text: str, axes: str) -> str:
    """The expression of mw shard or mw collective that a text means; the text itself if it is unknown.

    axes: the mesh axes. A gather or exchange is over the axes that shard its array, a sum over the others.

    >>> expression_here("A[I_x, J] * B[J, K_y]", "XY"), expression_here("ij,jk->ik", "X")
    ('A[I_X, J] . B[J, K_Y]', 'A[I, J] . B[J, K] -> C[I, K]')
    >>> expression_here("A[Ix, Jy] . B[Jy, K]", "XY"), expression_here("AllReduce_X [B]{U_X}", "X")
    ('A[I_X, J_Y] . B[J_Y, K]', 'AllReduce_X([B]{U_X})')
    >>> expression_here("AllReduce_Y(A[B, D])", "XY"), expression_here("ReduceScatter_{Y,D}([B, D])", "XY")
    ('AllReduce_Y([B, D]{U_Y})', 'ReduceScatter_{Y,B}([B, D]{U_Y})')
    >>> expression_here("AllGather([B_X, D_Y], X)", "XY")
    'AllGather_X([B_X, D_Y])'
    >>> expression_here("all-gather A[I_X, J]", "X"), expression_here("AllReduce([B_X, D])", "XY")
    ('AllGather_X([I_X, J])', 'AllReduce_Y([B_X, D]{U_Y})')
    """
    if match := _EINSUM.fullmatch(text) or _QUOTED.search(text):
        first, second, out = (f"[{', '.join(letters.upper())}]" for letters in match.groups())
        return f"A{first} . B{second} -> C{out}"
    text = _AXIS_LAST.sub(r"\1_\3(\2)", text)
    text = re.sub(r"_\{([A-Z]{2,})\}", r"_\1", text)
    plain = re.sub(r"_([a-z])\b", lambda letter: f"_{letter[1].upper()}", text)
    plain = re.sub(r"\b([A-Z])([a-z])(?=\s*[,\]])", lambda two: f"{two[1]}_{two[2].upper()}", plain)
    plain = re.sub(rf"(?<=[\[ ,])([A-Z])([{axes}])(?=\s*[,\]])", r"\1_\2", plain) if axes else plain
    plain = _ARROW.sub(" -> ", _JOINED.sub("] . ", plain))
    plain = re.sub(r"(\] \. .*\])\s*=\s*(?=\w+\[)", r"\1 -> ", plain)
    begins = re.match(r"\s*([A-Za-z]+(?:[-_ ][a-z]+)*)", text)
    name = re.sub(r"[^a-z]", "", begins[1].lower()) if begins else ""
    op = _op_of(name)
    array = _ARRAY.search(plain)
    # Of a ReduceScatter the dimension is named too, and of an AllToAll the result.
    is_whole = (op != "ReduceScatter" or re.match(r"\w+_\{\w+,", text)) and (op != "AllToAll" or "->" in text)
    is_sum = op in ("AllReduce", "ReduceScatter")
    if is_sum and "{U" not in text:  # the partial sums are over the axes of the name
        is_whole, axes = False, "".join(re.findall("[A-Z]", text.partition("(")[0].partition("_")[2])) or axes
    if op and is_whole and re.match(r"\w+_(\{|[A-Z])", text):
        bare = re.fullmatch(r"(\w+_(?:[A-Z]|\{[^}]*\}))\s+(\w*\[.*)", text)  # without parentheses
        return f"{bare[1]}({bare[2]})" if bare else text
    return _collective(op, array[1], array[2] or "", axes) if op and array and " . " not in plain else plain


def matmul_here(words: Sequence[str], machines: Sequence[str], dtype: str) -> list[str]:
    """The words of mw shard for one matmul on one chip, from its sizes; [] for words about something else.

    Sizes are M x N x K, which BLAS uses, or the two operands' shapes. machines: those of the words.

    >>> matmul_here("roofline matmul 512x4096x1024 h100".split(), ["h100"], "int8")[1:6]
    ['A[I, J] . B[J, K] -> C[I, K]', '--mesh', 'X=1', '--dims', 'I=512,J=1024,K=4096']
    >>> matmul_here("gemm 512,1024 @ 1024,4096".split(), [], "")[5]
    'I=512,J=1024,K=4096'
    >>> matmul_here("roofline --m 512 --n 4096 --k 1024".split(), [], "")[5]
    'I=512,J=1024,K=4096'
    """
    first = {word.lower() for word in words[:3]}
    if not first & (_MATMULS | _ROOFLINES) or words[0] in ("bench", "shard"):
        return []
    text = " ".join(word for word in words if word not in machines)
    if pairs := _PAIRS.search(text):
        rows, inner, other, columns = pairs.groups()
        sizes = {"I": rows, "J": inner, "K": columns} if inner == other else {}
    elif three := _THREE.search(text):
        rows, columns, inner = three.groups()
        sizes = {"I": rows, "J": inner, "K": columns}
    else:
        options = ((_SIZES.get(name.lower()), value) for name, value in pairwise(words))
        sizes = {letter: size for letter, size in options if letter and re.fullmatch(r"[1-9]\d*", size)}
    if sorted(sizes) != ["I", "J", "K"]:
        return []
    dims = ",".join(f"{letter}={sizes[letter]}" for letter in "IJK")
    line = ["shard", "A[I, J] . B[J, K] -> C[I, K]", "--mesh", "X=1", "--dims", dims]
    if machines:
        line += ["--hardware", f"{machines[0].partition(':')[0]}:1"]
    return [*line, *(["--dtype", dtype] if dtype else [])]


def array_of_bytes(name: str, size: str, mesh: str, over: str = "") -> list[str]:
    """The words of mw collective for a collective's name, bytes and mesh; [] for another name or axes.

    The array is in bfloat16, of one dimension, or of two for an exchange. over: the axis of the collective;
    "" for the mesh's first.

    >>> array_of_bytes("all-gather", "1GB", "X=8")
    ['AllGather_X([B_X])', '--mesh', 'X=8', '--dims', 'B=500000000']
    >>> array_of_bytes("all_reduce", "1073741824", "X=8")[-1]
    'B=536870912'
    >>> array_of_bytes("ReduceScatter", "1KiB", "X=8")
    ['ReduceScatter_{X,B}([B]{U_X})', '--mesh', 'X=8', '--dims', 'B=512']
    >>> array_of_bytes("all-to-all", "1KiB", "X=8")
    ['AllToAll_X([B_X, D] -> [B, D_X])', '--mesh', 'X=8', '--dims', 'B=64,D=8']
    """
    from meshwright.units import parse_bytes  # not loaded for the list of commands

    if re.fullmatch(r"\d+(\*\d+)+", size):  # 2*1024*8192 bytes
        size = f"{prod(map(int, size.split('*'))) / 1e3}kB"
    op = _op_of(plain_name(name))
    axis = re.match(r"[A-Z]", over or mesh)
    is_size = re.fullmatch(r"[\d.]+ ?[kmgt]?i?b?", size, re.I) is not None
    if not op or axis is None or not is_size:
        return []
    is_exchange = op == "AllToAll"
    bare = re.fullmatch(r"(\d+) ?b?", size, re.I)  # a number of bytes
    entries = (int(bare[1]) if bare else parse_bytes(size if size[-1] in "bB" else f"{size}B")) // 2
    number = re.search(rf"{axis[0]}=(\d+)", mesh)
    width = int(number[1]) if number and is_exchange else 1  # D is divided over the axis
    sizes = f"B={entries // width},D={width}" if is_exchange else f"B={entries}"
    expression = array_of_dims(name, ["B", "D"] if is_exchange else ["B"], axis[0])
    return [expression, "--mesh", mesh, "--dims", sizes]


def array_of_dims(name: str, dims: Sequence[str], axis: str) -> str:
    """The expression of a collective's name on an array of these dimensions, over an axis; "" if unknown.

    >>> array_of_dims("reduce-scatter", ["B", "D"], "X"), array_of_dims("allgather", ["B", "D"], "X")
    ('ReduceScatter_{X,B}([B, D]{U_X})', 'AllGather_X([B_X, D])')
    """
    op = _op_of(plain_name(name))
    first = f"{dims[0]}_{axis}" if op in ("AllGather", "AllToAll") else dims[0]
    partial = f"{{U_{axis}}}" if op in ("AllReduce", "ReduceScatter") else ""
    return _collective(op, ", ".join([first, *dims[1:]]), partial, axis) if op else ""


def _collective(op: str, dims: str, partial: str, axes: str) -> str:
    """The expression of a collective `op` on an array; "" if no axis is left for it.

    dims, partial: the array's dimensions and partial sums, as written. axes: the mesh axes.
    """
    sharded = re.findall(r"_(?:\{([^}]*)\}|([A-Z]+))", dims)
    used = [axis for braced, bare in sharded for axis in re.findall("[A-Z]", braced or bare)]
    other = re.findall(r"[A-Z]", partial.replace("U", "", 1)) or [axis for axis in axes if axis not in used]
    if op == "AllGather":
        return f"AllGather_{_subscript(used)}([{dims}])" if used else ""
    if op == "AllToAll":
        first, *rest = re.split(r",\s*", dims)
        moved = [re.sub(r"_.*", "", first), *rest]
        moved[-1] += f"_{used[0]}" if used else ""
        return f"AllToAll_{used[0]}([{dims}] -> [{', '.join(moved)}])" if used and rest else ""
    if used and not partial and (op == "ReduceScatter" or not other):
        other = used[:1]  # the sum is over this axis
        dims = re.sub(rf"_\{{?{used[0]}\}}?", "", dims)
    over = _subscript(other[:1])
    target = f"{{{over},{re.split(r'[_,]', dims)[0].strip()}}}" if op == "ReduceScatter" else over
    return f"{op}_{target}([{dims}]{{U_{over}}})" if over else ""


def _subscript(axes: list[str]) -> str:
    return axes[0] if len(axes) == 1 else f"{{{','.join(axes)}}}" if axes else ""


def sizes_here(text: str, letters: str) -> str:
    """Sizes of mesh axes or dimensions as NAME=SIZE,...; the text itself if it has none.

    letters: names for sizes without one.

    >>> sizes_here("4x4", "XYZ"), sizes_here("X:2,Y:2", "XYZ"), sizes_here("(2, 4)", "XYZ")
    ('X=4,Y=4', 'X=2,Y=2', 'X=2,Y=4')
    """
    bare = text.strip().strip("()[]{}")
    if re.fullmatch(r"\d+(\s*[x,*]\s*\d+)*", bare):
        sizes = re.split(r"\s*[x,*]\s*", bare)
        return ",".join(f"{name}={size}" for name, size in zip(letters, sizes, strict=False))
    pairs = re.findall(r"([A-Za-z]\w*)['\"]?\s*[:=]?\s*(\d[\w.]*)", bare)
    return ",".join(f"{name.upper() if len(name) == 1 else name}={size}" for name, size in pairs) or text
