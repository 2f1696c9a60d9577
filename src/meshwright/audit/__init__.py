"""What the compiler makes of a program, beside what was planned. To read it, follow a plan:

    plan       `audit.audit_plan` takes it, and makes the document of `mw audit` in the end
    compile/   `programs`: its step as planned, and as JAX traces it; `targets`: whose compiler is asked;
               `compile`: the step compiled in a process of its own; `cache`: what was compiled before
    hlo/       the compiled text as data. `parse`: instructions; `trace`: where values come from and go to;
               `op_names`: JAX's names of passes and scopes
    facts/     what the program does. `collectives`, on a mesh `emitted`, each with its bytes, devices and
               tensor; `products` with their FLOPs; `elementwise`: what is computed beside them; `buffers` at
               the peak; `schedule`: what runs beside what, and the step's time; `prices`: seconds on the
               links; `gaps`: what is not understood
    compare/   those beside the plan's. `line_up`: rows of tensors, each with its status; `rules`: the forms
               that mean the same; `products`; `findings`: what a difference costs; `unnamed`: collectives
               that have no tensor's name

Without a plan, `foreign` audits any compiled text, or any jitted function: the package can be called,
`meshwright.audit(jitted, *args, hardware="v5p:4x4x4")`. remarks/ has the usual accidents of sharded programs,
and what the compiler itself said. Everything that an audit says is a `Remark`.

`checks` holds a program to bounds, `numerics` compares losses and gradients with one device's, `profile`
measured seconds with planned ones; `second_opinion` and `tune` rank layouts by their compiled steps. shard/
is `mw shard --run`: contractions run on devices, their collectives beside the derived ones.
"""
