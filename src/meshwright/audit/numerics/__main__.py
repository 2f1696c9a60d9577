"""The separate process of `check_numerics`: the report of the plans in a folder, as JSON."""

import json
import sys
from pathlib import Path

from meshwright.audit.numerics import KERNEL_FILE, NARROW_FILE
from meshwright.audit.numerics.comparison import compared
from meshwright.plan_file import PLAN_FILE, load_plan

folder = Path(sys.argv[1])
more = [folder / name for name in (NARROW_FILE, KERNEL_FILE)]
others = [load_plan(file) if file.exists() else None for file in more]
report = compared(load_plan(folder / PLAN_FILE), *others)
print(json.dumps(report))
