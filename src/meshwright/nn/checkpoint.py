"""Checkpoints of a training state, through Orbax, restored onto any mesh.

    checkpoints/<step>/state        every array of the state by its name: params.wq, opt_state.0.mu.wq
    checkpoints/<step>/data         where the data stood, as JSON
    checkpoints/<step>/files.json   the size of every file above, written last

Arrays are stored by name and not by tree, so a checkpoint outlives the classes that held it, and
serving reads the parameters without knowing the optimizer. Orbax writes a step beside its place and
renames it, so a killed run leaves no half of one.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from meshwright.errors import CheckpointError
from meshwright.files import write_whole

_FILES = "files.json"
_KEPT = 2


def save(directory: Path, step: int, state: Any, data_position: dict[str, Any], *, keep: int = _KEPT) -> None:
    """Writes `state` and `data_position` as checkpoint `step`, and removes all but the last `keep`."""
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
    with ocp.CheckpointManager(directory.absolute(), options=options) as manager:
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(_by_name(state)), data=ocp.args.JsonSave(data_position)
        )
        manager.save(step, args=items)
    if jax.process_index() == 0:
        _list_files(directory / str(step))


def restore(directory: Path, abstract_state: Any, step: int | None = None) -> tuple[Any, dict[str, Any], int]:
    """(state, data_position, step) of the checkpoint `step`, or of the latest.

    abstract_state: the state as jax.ShapeDtypeStruct with the shardings to restore onto (an array
    without one goes to the first device); neither the mesh nor the number of devices need be those
    that saved. Raises CheckpointError where there is none, it is cut short, or an array differs.
    """
    step = _complete_step(directory, step)
    wanted = _by_name(abstract_state)
    with _opened(directory, step) as checkpointer:
        stored = _check(directory / str(step), wanted, checkpointer)
        for name in sorted(stored.keys() - wanted.keys()):
            raise CheckpointError(
                f"checkpoint {directory / str(step)}: holds {name}{list(stored[name].shape)},"
                " which this model has not; name the run of this model"
            )
        items = ocp.args.Composite(state=_to_restore(wanted), data=ocp.args.JsonRestore())
        restored = checkpointer.restore(_path(directory, step), args=items)
    return _like(abstract_state, restored["state"]), restored["data"], step


def restore_params(directory: Path, abstract_params: Any, step: int | None = None) -> Any:
    """The parameters alone of the checkpoint `step` or the latest, for serving; no more is read.

    They are what the saved state held under the name `params`. Errors as for `restore`; arrays are
    cast to the type asked for.
    """
    step = _complete_step(directory, step)
    abstract = {"params": abstract_params}
    wanted = _by_name(abstract)
    with _opened(directory, step) as checkpointer:
        _check(directory / str(step), wanted, checkpointer, cast=True)
        items = ocp.args.Composite(state=_to_restore(wanted))
        restored = checkpointer.restore(_path(directory, step), args=items)
    return _like(abstract, restored["state"])["params"]


def latest_step(directory: Path) -> int | None:
    """The last step saved in `directory`, None where there is none."""
    return max(_steps(directory), default=None)


def _steps(directory: Path) -> list[int]:
    return ocp.utils.checkpoint_steps(directory.absolute()) if directory.is_dir() else []


def _path(directory: Path, step: int) -> Path:
    return directory.absolute() / str(step)


def _by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their dotted paths, whatever containers it is made of."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves share a name"
    return named


def _like(tree: Any, named: dict[str, Any]) -> Any:
    """`named` put back into the containers of `tree`."""
    return jax.tree.unflatten(jax.tree.structure(tree), [named[name] for name in _by_name(tree)])


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
    """A reader of the checkpoint's two items, whose failures come out as CheckpointError."""
    handler = ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(), data=ocp.JsonCheckpointHandler()
    )
    with ocp.Checkpointer(handler) as checkpointer:
        try:
            yield checkpointer
        except (CheckpointError, jax.errors.JaxRuntimeError):  # the latter: out of memory, not damage
            raise
        except Exception as error:  # Orbax and TensorStore raise bare Exception and ValueError
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(_damaged(directory, step, f"cannot be read ({reason[:200]})")) from error


def _check(
    path: Path, wanted: dict[str, Any], checkpointer: ocp.Checkpointer, cast: bool = False
) -> dict[str, Any]:
    """What the checkpoint holds by name; CheckpointError at the first array it lacks or has otherwise."""
    items: Any = checkpointer.metadata(path.absolute()).item_metadata
    stored: dict[str, Any] = items["state"].tree
    for name, leaf in wanted.items():
        if name not in stored:
            raise CheckpointError(
                f"checkpoint {path}: has no {name}{list(leaf.shape)}; name the run of this model"
            )
        there = stored[name]
        if tuple(there.shape) != tuple(leaf.shape):
            raise CheckpointError(
                f"checkpoint {path}: {name} is {list(there.shape)} there and {list(leaf.shape)} in this"
                " model; name the run of this model"
            )
        if there.dtype != leaf.dtype and not cast:
            raise CheckpointError(
                f"checkpoint {path}: {name} is {there.dtype} there and {leaf.dtype} in this run;"
                f" train on in {there.dtype}"
            )
    return stored


def _list_files(path: Path) -> None:
    sizes = {
        file.relative_to(path).as_posix(): file.stat().st_size
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
    write_whole(path / _FILES, json.dumps(sizes, indent=0))


def _complete_step(directory: Path, step: int | None) -> int:
    """`step`, or the latest; CheckpointError where there is none or it is cut short."""
    steps = _steps(directory)
    if not steps:
        raise CheckpointError(f"checkpoint: {directory} holds none; train first, or without --resume")
    if step is None:
        step = max(steps)
    if step not in steps:
        known = ", ".join(map(str, sorted(steps)))
        raise CheckpointError(f"checkpoint: {directory} holds no step {step}; there: {known}")
    _check_files(directory, step)
    return step


def _check_files(directory: Path, step: int) -> None:
    """CheckpointError at the first file that is missing or has another size than when it was saved.

    Done before Orbax reads anything: it finds the damage too, but in a thread of its own, with
    tracebacks on standard error and no word of what to do.
    """
    path = directory / str(step)
    try:
        sizes: dict[str, int] = json.loads((path / _FILES).read_text())
    except (OSError, ValueError):
        raise CheckpointError(_damaged(directory, step, f"has no whole {_FILES}")) from None
    for name, size_bytes in sizes.items():
        if not (path / name).is_file():
            raise CheckpointError(_damaged(directory, step, f"lacks {name}"))
        found_bytes = (path / name).stat().st_size
        if found_bytes != size_bytes:
            raise CheckpointError(
                _damaged(directory, step, f"{name} has {found_bytes} of {size_bytes} bytes")
            )


def _damaged(directory: Path, step: int, how: str) -> str:
    """The message for a checkpoint that is cut short: how, and which earlier step to go on from."""
    earlier = [other for other in _steps(directory) if other < step]
    cure = f"to go on from step {max(earlier)}" if earlier else "and train again: there is no earlier step"
    return f"checkpoint {directory / str(step)}: is cut short: {how}; delete that folder {cure}"
