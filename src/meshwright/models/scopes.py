"""Names of scopes of the forward pass that the audit reads in compiled programs."""

# The scope of the sums of cotangents of layers that share keys and values.
SHARED_KV = "shared_kv"
# The scope of gradients that a forward pass computes, which the audit counts in the backward pass.
BACKWARD = "backward"


def input_of(*names: str) -> str:
    """The name of the shared input of the products with the weights `names`.

    >>> input_of("wq", "wk", "wv")
    'to_wq+wk+wv'
    """
    return f"to_{'+'.join(names)}"


def at_most(num_trips: int, num_runs: int = 1) -> str:
    """The scope of a loop whose trips depend on data: at most `num_trips` in `num_runs` runs.

    >>> at_most(32), at_most(10, 4)
    ('at_most_32_trips', 'at_most_10_trips_in_4_runs')
    """
    return f"at_most_{num_trips}_trips" + (f"_in_{num_runs}_runs" if num_runs > 1 else "")


def at_most_blocks(num_blocks: int, among: int) -> str:
    """The scope of a branch that is taken at most `num_blocks` times in `among`.

    >>> at_most_blocks(3, 4)
    'at_most_3_of_4_blocks'
    """
    return f"at_most_{num_blocks}_of_{among}_blocks"


def by_even_load(num_trips: int) -> str:
    """The scope of a loop over the experts' rows: `num_trips` if the load is even.

    >>> by_even_load(64)
    'by_even_load_64_trips'
    """
    return f"by_even_load_{num_trips}_trips"


def in_extra_passes() -> str:
    """The scope of extra passes, which run if one expert gets far more rows than the others.

    >>> in_extra_passes()
    'by_even_load_0_trips'
    """
    return by_even_load(0)


def rows_by_even_load(op: str, num_rows: int) -> str:
    """The scope of an exchange of the experts' rows: `op` of `num_rows` if the load is even.

    >>> rows_by_even_load("all_to_all", 512)
    'all_to_all_by_even_load_512_rows'
    """
    return f"{op}_by_even_load_{num_rows}_rows"
