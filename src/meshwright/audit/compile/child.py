"""A module of the audit in a process of its own, since the devices are fixed when JAX starts."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import AuditError

_ERROR_LINE = re.compile(r"(?:[\w.]+\.)?\w*(?:Error|Exception): (.*)")


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


def error_line(log: str, code: int) -> str:
    """The reason in the log of a failed process: the last error of the traceback, or the last line."""
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [match[1] for line in lines if (match := _ERROR_LINE.match(line))]
    return (errors or lines or [f"exit code {code}"])[-1]
