"""The cache of compiled programs, whose entries are pickled, is this user's and closed to others."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from meshwright.nn.start.compiled_cache import CheckedEntries, keep_compiled


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


class Files:
    """JAX's cache in short."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> bytes | None:
        path = self.folder / f"{key}-cache"
        return path.read_bytes() if path.exists() else None

    def put(self, key: str, content: bytes) -> None:
        path = self.folder / f"{key}-cache"
        assert not path.exists()
        path.write_bytes(content)


def test_an_entry_that_was_changed_cut_or_renamed_is_not_used(tmp_path: Path):
    entries = CheckedEntries(Files(tmp_path), tmp_path)
    entries.put("a", b"program")
    assert entries.get("a") == b"program" and entries.get("b") is None
    whole = (tmp_path / "a-cache").read_bytes()
    for key, content in (
        ("a", b"P" + whole[1:]),
        ("a", whole[:-1]),
        ("a", b"program"),
        ("a", b""),
        ("b", whole),
    ):
        (tmp_path / f"{key}-cache").write_bytes(content)
        assert entries.get(key) is None and not (tmp_path / f"{key}-cache").exists()
    entries.put("a", b"program")
    assert entries.get("a") == b"program"


PROGRAM = """
import jax
from meshwright.nn.start.compiled_cache import keep_compiled
loaded = []
jax.monitoring.register_event_listener(lambda event, **_: loaded.append(event))
keep_compiled()
assert jax.jit(lambda x: x * 2)(3.0) == 6
print(loaded.count("/jax/compilation_cache/cache_hits"))
"""


@pytest.mark.slow
def test_jax_loads_whole_entries_and_compiles_others_again(tmp_path: Path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}

    def num_loaded() -> int:
        command = [sys.executable, "-W", "error", "-c", PROGRAM]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return int(ended.stdout)

    assert num_loaded() == 0
    num_entries = num_loaded()
    assert num_entries > 0
    for path in (tmp_path / "meshwright" / "xla").glob("*-cache"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    assert num_loaded() == 0 and num_loaded() == num_entries


def test_a_link_to_nowhere_is_not_used(cache: Path):
    cache.mkdir()
    (cache / "xla").symlink_to(cache / "elsewhere" / "folder")
    with pytest.warns(UserWarning, match="cannot be used"):
        keep_compiled()
