"""Checkpoints of a training state through Orbax: saved while the run goes on, restored onto any mesh.

Arrays are stored by name (params.wq, opt_state.0.mu.wq) and not by tree, so a checkpoint outlives the
classes that held it, and serving reads the parameters without knowing the optimizer. The folder's other
files, and the rules for complete checkpoints, are in checkpoint_files.py.
"""

import json
import logging
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging as absl_logging
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding

from meshwright.errors import CheckpointError, OutputError
from meshwright.files import write_whole
from meshwright.nn.files import checkpoint_files as files
from meshwright.nn.frozen import Frozen, as_saved, regrouped
from meshwright.nn.moments import in_blocks, is_packed, repacked
from meshwright.nn.start.processes import wait_for_all

# Orbax writes errors of its threads to standard error, with tracebacks, before it raises them here.
absl_logging.set_verbosity(absl_logging.FATAL)


class Saver:
    """Saves checkpoints into a folder in the background, one at a time.

    keep: number of latest checkpoints to keep, plus the one with the lowest validation loss. Every process
    calls the same methods in the same order. `save` returns once the arrays are copied off the devices,
    so that the next step may overwrite them. An error of a save is raised by the next call.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory, self._keep = directory.absolute(), keep
        _quiet_failures()
        # Trained weights do not compress: zstd took four times the writing and saved 7%.
        handler = ocp.PyTreeCheckpointHandler(use_compression=False)
        self._orbax = ocp.AsyncCheckpointer(handler)
        self._commit: threading.Thread | None = None
        self._saving: int | None = None
        self._error: BaseException | None = None
        if jax.process_index() == 0:
            shutil.rmtree(self._directory / files.SAVING, ignore_errors=True)

    def save(self, step: int, state: object, position: dict[str, Any]) -> None:
        """Begins to save `state` and `position` as checkpoint `step`, once the save before is done."""
        self.wait()
        partial = self._directory / files.SAVING / str(step)
        self._saving = step
        with self._errors():
            partial.parent.mkdir(parents=True, exist_ok=True)
            self._orbax.save(partial / files.STATE, args=ocp.args.PyTreeSave(by_name(state)), force=True)
        self._commit = threading.Thread(target=self._finish, args=(partial, position), name="checkpoint")
        self._commit.start()

    def _finish(self, partial: Path, position: dict[str, Any]) -> None:
        try:
            self._orbax.wait_until_finished()
            if jax.process_index() == 0:
                write_whole(partial / files.POSITION, json.dumps(position))
                files.seal(partial)
                files.put_in_place(partial, self._directory)
                files.prune(self._directory, self._keep)
        except BaseException as error:  # raised in the thread that trains, by `check`
            self._error = error

    def check(self) -> None:
        """Raises OutputError if a save has failed, and removes its files to make room."""
        if self._error is not None and not self.busy:
            error, self._error = self._error, None
            with self._errors():
                raise error

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._commit is not None and self._commit.is_alive()

    def wait(self) -> None:
        """Returns once no save is under way, here and in process 0, which completes them."""
        if self._commit is not None:
            self._commit.join()
            self._commit = None
            self.check()
            wait_for_all("a checkpoint is complete")
        self.check()

    def close(self) -> None:
        """Waits for the current save, and frees the saver's resources."""
        try:
            self.wait()
        finally:
            self._orbax.close()
            with suppress(OSError):  # not empty: a save has failed
                (self._directory / files.SAVING).rmdir()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors in writing, as OutputError with the step to go on from."""
        try:
            yield
        except (OSError, ValueError, OutputError) as error:  # TensorStore raises ValueError for any status
            shutil.rmtree(self._directory / files.SAVING, ignore_errors=True)
            steps = files.checkpoint_steps(self._directory)
            cure = f"go on from step {steps[-1]} with --resume" if steps else "there is no earlier one"
            path = self._directory / str(self._saving)
            raise OutputError(
                f"checkpoint {path}: cannot be written ({_reason(error)}); make room, then {cure}"
            ) from error


def _quiet_failures() -> None:
    """Mutes asyncio's and TensorStore's reports of each array of a failed save; `Saver.check` raises.

    Orbax closes the event loop at the first failure; later callbacks of TensorStore raise an error that no
    code can catch, and that Python prints (orbax 0.12, tensorstore 0.1.86).
    """
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    previous = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            previous(unraisable)

    if previous is sys.__unraisablehook__:
        sys.unraisablehook = hook


def restore(
    directory: Path, abstract_state: object, step: int | None = None
) -> tuple[Any, dict[str, Any], int]:
    """(state, position, step) of the checkpoint `step`, or of the last that is sound.

    abstract_state: the state as jax.ShapeDtypeStruct with the shardings to restore onto (an array
    without one goes to the first device); mesh and number of devices may differ from the run that saved.
    A damaged checkpoint is skipped for the one before it, with a warning that names it.
    Moments in 8 bits are packed again if the layout that saved them had other blocks, and groups of frozen
    weights are cut if it had larger ones.
    Raises CheckpointError if there is none, `step` itself is damaged, or an array differs.
    """
    step = sound_step(directory, step)
    with _opened(directory, step) as checkpointer:
        stored_types = _in_stored_blocks(abstract_state, _stored(directory, step, checkpointer))
        wanted = by_name(stored_types)
        stored = _check(directory, step, wanted, checkpointer)
        for name in sorted(stored.keys() - wanted.keys()):
            raise CheckpointError(
                f"checkpoint {directory / str(step)}: holds {name}{list(stored[name].shape)},"
                " which this model has not; name the run of this model"
            )
        restored = checkpointer.restore(_path(directory, step), args=_to_restore(wanted))
    state = _in_own_blocks(like(stored_types, restored), abstract_state)
    return state, files.read_position(directory, step), step


def _in_stored_blocks(abstract_state: Any, stored: dict[str, Any]) -> Any:
    """The state's types, with moments and frozen weights in the blocks of the stored arrays."""

    def leaf(path: tuple[Any, ...], leaf_own: Any) -> Any:
        scales = stored.get(f"{jax.tree_util.keystr(path, simple=True, separator='.')}.scales")
        if not _has_blocks(leaf_own) or scales is None or len(scales.shape) != leaf_own.scales.ndim:
            return leaf_own
        if isinstance(leaf_own, Frozen):
            return as_saved(leaf_own, tuple(scales.shape))
        count = scales.shape[-1]
        return leaf_own if count == leaf_own.scales.shape[-1] else in_blocks(leaf_own, count)

    return jax.tree_util.tree_map_with_path(leaf, abstract_state, is_leaf=_has_blocks)


def _has_blocks(node: object) -> bool:
    return is_packed(node) or isinstance(node, Frozen)


def _in_own_blocks(restored: Any, abstract: Any) -> Any:
    """The restored state with moments and frozen weights in the blocks of `abstract`."""

    def leaf(restored: Any, abstract: Any) -> Any:
        if isinstance(restored, Frozen):
            return regrouped(restored, abstract)
        if not is_packed(restored) or restored.scales.shape == abstract.scales.shape:
            return restored
        return repacked(restored, abstract)

    return jax.tree.map(leaf, restored, abstract, is_leaf=_has_blocks)


def restore_params(directory: Path, abstract_params: Mapping[str, Any], step: int | None = None) -> Any:
    """Only the parameters of the checkpoint `step` or the last sound one, for serving.

    They are the arrays that the saved state held under the name `params`. Warnings and errors as for
    `restore`; arrays are cast to the type asked for.
    """
    step = sound_step(directory, step)
    abstract = {"params": abstract_params}
    with _opened(directory, step) as checkpointer:
        stored_types = _in_stored_blocks(abstract, _stored(directory, step, checkpointer))
        wanted = by_name(stored_types)
        _check(directory, step, wanted, checkpointer, cast=True)
        restored = checkpointer.restore(_path(directory, step), args=_to_restore(wanted))
    return _in_own_blocks(like(stored_types, restored), abstract)["params"]


def sound_step(directory: Path, step: int | None = None) -> int:
    """`step`, or the last sound one; process 0 reads the files and broadcasts the result.

    Warns of each damaged checkpoint that is skipped. Raises CheckpointError if none is sound.
    """
    failure, damaged = "", []
    if jax.process_index() == 0:
        try:
            if step is None:
                step, damaged = files.newest_sound(directory)
            else:
                files.check_sound(directory, step)
        except CheckpointError as error:
            failure = str(error)
    if jax.process_count() > 1:
        agreed = -1 if failure else step
        step = int(multihost_utils.broadcast_one_to_all(-1 if agreed is None else agreed))
        if step < 0 and not failure:
            failure = f"checkpoint: process 0 finds none in {directory} that is sound"
    if failure:
        raise CheckpointError(failure)
    assert step is not None
    for sentence in damaged:
        warnings.warn(f"{sentence}; going on from step {step}", stacklevel=2)
    return step


def _path(directory: Path, step: int) -> Path:
    return directory.absolute() / str(step) / files.STATE


def by_name(tree: object) -> dict[str, Any]:
    """The leaves of a tree of any containers by their dotted paths."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves share a name"
    return named


def like(tree: object, named: dict[str, Any]) -> Any:
    """`named` put back into the containers of `tree`."""
    return jax.tree.unflatten(jax.tree.structure(tree), [named[name] for name in by_name(tree)])


def _to_restore(wanted: dict[str, Any]) -> ocp.args.PyTreeRestore:
    first_device = SingleDeviceSharding(jax.local_devices()[0])
    args = {
        name: ocp.ArrayRestoreArgs(
            sharding=leaf.sharding or first_device, global_shape=leaf.shape, dtype=leaf.dtype
        )
        for name, leaf in wanted.items()
    }
    return ocp.args.PyTreeRestore(item=wanted, restore_args=args, partial_restore=True)


@contextmanager
def _opened(directory: Path, step: int) -> Iterator[ocp.Checkpointer]:
    """A reader of the checkpoint's arrays, whose failures are raised as CheckpointError."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        try:
            yield checkpointer
        except (CheckpointError, jax.errors.JaxRuntimeError):  # the latter: out of memory, not damage
            raise
        except Exception as error:  # Orbax and TensorStore raise bare Exception and ValueError
            path = directory / str(step)
            raise CheckpointError(f"checkpoint {path}: cannot be read ({_reason(error)})") from error


def _reason(error: BaseException) -> str:
    """The most specific sentence of an error: the system's own if it has one."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).splitlines() or [type(error).__name__]
    return next((text for text in _DISK_ERRORS if text in str(error)), lines[0][:200])


_DISK_ERRORS = ("No space left on device", "Disk quota exceeded", "File too large", "Read-only file system")


def _stored(directory: Path, step: int, checkpointer: ocp.Checkpointer) -> dict[str, Any]:
    """The types of the checkpoint's arrays by name."""
    metadata: Any = checkpointer.metadata(_path(directory, step)).item_metadata
    return metadata.tree


def _check(
    directory: Path, step: int, wanted: dict[str, Any], checkpointer: ocp.Checkpointer, cast: bool = False
) -> dict[str, Any]:
    """The checkpoint's types by name; CheckpointError at the first array that is missing or differs."""
    path, stored = directory / str(step), _stored(directory, step, checkpointer)
    for name, leaf in wanted.items():
        # A moment may be packed in only one of the two runs.
        other = stored.get(name.removesuffix(".values"), stored.get(f"{name}.values"))
        if name not in stored and other is not None:
            raise _of_other_dtype(path, name, other.dtype, leaf.dtype)
        if name not in stored:
            raise CheckpointError(
                f"checkpoint {path}: has no {name}{list(leaf.shape)}; name the run of this model"
            )
        stored_leaf = stored[name]
        if tuple(stored_leaf.shape) != tuple(leaf.shape):
            raise CheckpointError(
                f"checkpoint {path}: {name} is {list(stored_leaf.shape)} there and {list(leaf.shape)} in this"
                " model; name the run of this model"
            )
        if stored_leaf.dtype != leaf.dtype and not cast:
            raise _of_other_dtype(path, name, stored_leaf.dtype, leaf.dtype)
    return stored


def _of_other_dtype(path: Path, name: str, stored: object, here: object) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path}: {name} is {stored} there and {here} in this run; train on in {stored}"
    )
