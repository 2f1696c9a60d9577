"""How work that takes a while tells of itself."""

from collections.abc import Callable

Progress = Callable[[str, float | None], None]  # (what is being done, fraction done or None)
