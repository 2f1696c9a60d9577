"""The cache of compiled programs, whose entries are pickled, is this user's and closed to others."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from meshwright.nn.start.compiled_cache import keep_compiled


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    before = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path / "meshwright"
    jax.config.update("jax_compilation_cache_dir", before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_folder_that_others_may_write_is_closed(cache: Path):
    (cache / "xla").mkdir(parents=True)
    (cache / "xla").chmod(0o777)
    cache.chmod(0o777)
    keep_compiled()
    assert (mode(cache), mode(cache / "xla")) == (0o755, 0o700)
    assert jax.config.jax_compilation_cache_dir == str(cache / "xla")  # pyright: ignore[reportAttributeAccessIssue]


def test_a_new_folder_is_closed(cache: Path):
    keep_compiled()
    assert mode(cache / "xla") == 0o700


def test_a_folder_of_another_user_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch):
    (cache / "xla").mkdir(parents=True)
    monkeypatch.setattr(os, "getuid", lambda: (cache / "xla").stat().st_uid + 1)
    if (cache / "xla").stat().st_uid == 0:
        os.chown(cache / "xla", 12345, -1)
    with pytest.warns(UserWarning, match="belongs to another user; compiled programs are not kept"):
        keep_compiled()
    assert jax.config.jax_compilation_cache_dir is None  # pyright: ignore[reportAttributeAccessIssue]


def test_a_link_to_nowhere_is_not_used(cache: Path):
    cache.mkdir()
    (cache / "xla").symlink_to(cache / "elsewhere" / "folder")
    with pytest.warns(UserWarning, match="cannot be used"):
        keep_compiled()
