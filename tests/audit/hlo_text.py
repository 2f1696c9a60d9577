"""Pieces of HLO that several tests' programs begin with."""

# Of four devices, with the function that sums reduce with.
HEAD = """HloModule test, num_partitions=4

%sum (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %add = bf16[] add(%a, %b)
}

"""
