"""The separate process of `check_numerics`: the report of the plans in a folder, as JSON."""

import json
import sys
from pathlib import Path

from meshwright.audit.numerics import NARROW_FILE
from meshwright.audit.numerics.comparison import compared
from meshwright.plan_file import PLAN_FILE, load_plan

folder = Path(sys.argv[1])
narrow = folder / NARROW_FILE
report = compared(load_plan(folder / PLAN_FILE), load_plan(narrow) if narrow.exists() else None)
print(json.dumps(report))
