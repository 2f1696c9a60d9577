"""What the compiler makes of a program, beside what was planned.

The package can be called: `meshwright.audit(jitted, *args, hardware="v5p:4x4x4")`; see `audit.jitted`.
The audit of a plan, `audit.audit_plan`, goes through the rooms in this order:

    compile/   the step of a plan, traced and compiled for a TPU, GPU or CPU in a process of its own -> text
    hlo/       that text as data: instructions, where a value comes from, JAX's names
    facts/     what the program does: collectives on mesh axes, FLOPs, buffers at the peak, what overlaps
    compare/   those beside the plan's: rows, each with its verdict, and what a difference costs
    remarks/   without a plan: the usual accidents of sharded programs (`foreign` audits any program)
    shard/     `mw shard --run`: contractions run on devices, their collectives beside the derived ones
"""
