"""What the compiler makes of a program, beside what was planned.

The package can be called: `meshwright.audit(jitted, *args, hardware="v5p:4x4x4")`; see `audit.jitted`.
"""
