"""Audits of compiled programs against their plans.

The folders, in the order that a plan passes through them:

    plan       `audit.audit_plan` takes the plan and returns the document of `mw audit`
    compile/   `planned_program`: the step as planned and as JAX traces it; `targets`: which compiler;
               `compile`: compiles the step in a separate process; `cache`: earlier compiled programs
    hlo/       the compiled text as data. `read`: instructions; `trace`: the flow of values;
               `op_names`: JAX's names of passes and scopes
    facts/     the work of a program. `communication`, and on a mesh `emitted`: collectives with their bytes,
               devices and tensors; `products`: FLOPs; `elementwise`: other arithmetic; `buffers`: memory at
               the peak; `timeline`: overlap and the step's time; `seconds`: time on the links; `gaps`:
               instructions that are not counted
    compare/   plan and program. `line_up`: one row per tensor, with a status; `rewrites`: equivalent forms of
               a collective; `flops`: products; `findings`: the cost of a difference; `unnamed`: collectives
               without a tensor's name

`foreign` audits compiled text or a jitted function without a plan, for `mw audit --jit` and the library's
`mw.audit(jitted, *args, hardware="v5p:4x4x4")`. remarks/: common mistakes in sharded programs, and
the compiler's own warnings. All results of an audit are `Remark`s.

`checks` tests a program against bounds. `numerics` compares losses and gradients with one device's. `profile`
compares measured with planned seconds. `second_opinion` and `tune` rank layouts by their compiled steps.
shard/ is `mw shard --run`: contractions on devices, with emitted and derived collectives.
"""
