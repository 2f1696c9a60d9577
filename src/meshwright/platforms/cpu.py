"""Virtual devices on the host's processors. Figures: XLA for CPU of jax 0.10.2."""

from meshwright.platforms.platform import Compiler, ExpertBlocks, Platform

CPU = Platform(
    name="cpu",
    plural="CPUs",
    network="host",
    links=("host",),
    resources={"ici": "copies between devices"},
    host_memory=True,
    virtual=True,
    # XLA's collectives hold a thread until all of their devices have come, so several programs at once can
    # take all threads: steps of 8 devices on 2 busy cores ended at XLA's rendezvous time-out in every try.
    in_turn=True,
    jax_settings={"jax_cpu_collectives_implementation": "gloo"},
    dtype="f32",
    compute_dtypes=None,
    cache_as_bits=True,  # XLA updates pages of bf16 100 times slower
    packs_int4=True,
    # No tables are gathered for each row, and short rows waste less.
    page_by_page=True,
    prompt_rows=16,
    # XLA widens the operands of a product that it rounds to bf16, copies and all: with weights of 768 x 2048,
    # 2,048 rows took 37 ms, and 18 if they are rounded afterwards (Zen 4).
    wide_products=True,
    joins_weights=True,
    pairs_rows=True,  # XLA's fast path begins with two rows
    # jaxlib's triangular solve of a batch (`ParallelBatchMap`) hands its parts to XLA's pool of threads and
    # waits in a thread of it: on two devices of two cores both threads waited for ever (jax 0.10.2).
    solve_blocks=True,
    # A tile of fewer rows costs less for one row, and more for many (float32, 6 x 768-2048-768, two cores:
    # tiles of 8, 16 and 32 rows took 8, 16 and 24 ms for one row; 23, 16, 21 for 16; 468, 376, 351 for 512).
    tile_rows=16,
    native=True,
    # XLA fuses no product with its readers: logits of all tokens, their gradients and a transposed copy of
    # these cross memory again and again (15M parameters, 2,048 tokens, f32: 7.3 s of a step of 11.5 s).
    head_tokens=512,
    one_sampler=True,
    # A block reads its expert's weights in the time of 26 rows, and rows of padding cost more.
    expert_blocks=ExpertBlocks(share=8),
    ragged_exchange=False,  # XLA has none
    early_recompute=True,  # XLA drops the barriers of rematerialisation
    compiler=Compiler(
        lowering="cpu",
        options={"xla_backend_optimization_level": 0},  # of LLVM: the same program in half of the time
        reduce_scatter=False,
        asynchronous=False,
        widens=True,
        as_traced=True,
        # XLA widens 16-bit numbers and orders operations without regard to memory, and a plan has the order
        # of the other compilers: steps of small models in one program take 2.2 times the memory.
        total_tolerance=1.5,
        # XLA keeps every name; a factor of the embedding makes 0.18% of a step of four layers.
        unplanned_share=1e-5,
    ),
)
