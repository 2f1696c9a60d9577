"""Names of kernels written here; an audit recognises them in a compiled program."""

DECODE_PAGES, JOIN_PARTS = "decode_pages_of", "join_parts"  # the first is followed by a page's size
ALLOCATE = "allocate"  # does not write its result
