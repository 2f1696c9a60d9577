"""A module of the audit in a process of its own, since the devices are fixed when JAX starts."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.audit.compile.compile import error_line
from meshwright.errors import AuditError


def report_of(
    module: str,
    arguments: Sequence[str] = (),
    *,
    environment: Mapping[str, str],
    seconds: int,
    slow: str,
    failed: str,
    given: bytes = b"",
) -> Any:
    """The JSON document on the last line that `python -m module` prints.

    given: its input. Raises AuditError: `slow` after these seconds, with their number, or `failed` with the
    reason.
    """
    try:
        ran = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            env=environment,
            input=given,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise AuditError(f"{slow} over {seconds} s") from None
    if ran.returncode:
        why = error_line(ran.stderr.decode(errors="replace"), ran.returncode)
        raise AuditError(f"{failed}: {why}")
    return json.loads(ran.stdout.decode().strip().splitlines()[-1])
