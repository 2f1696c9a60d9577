"""`mw tune`: changes of a plan, tried by compiling for its hardware.

neighbours   remat policies and layouts one step away, by the plan's price
options      XLA's documented options
tune         each tried on the best so far; what each gave
"""
