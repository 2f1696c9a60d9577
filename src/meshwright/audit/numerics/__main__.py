"""The separate process of `check_numerics`: the report of the plans in a folder, as JSON."""

import json
import sys
from pathlib import Path

from meshwright.audit.numerics import KERNEL_FILE, NARROW_FILE
from meshwright.audit.numerics.comparison import compared
from meshwright.plan_file import PLAN_FILE, load_plan

folder = Path(sys.argv[1])
narrow, of_kernel = (
    load_plan(folder / name) if (folder / name).exists() else None for name in (NARROW_FILE, KERNEL_FILE)
)
print(json.dumps(compared(load_plan(folder / PLAN_FILE), narrow, of_kernel)))
