"""Names of kernels written here, by which an audit knows them in a compiled program."""

DECODE_PAGES, JOIN_PARTS = "decode_pages_of", "join_parts"  # the first is followed by a page's size
