"""A process killed between any two system calls of a save leaves whole checkpoints."""

import subprocess
import sys
from pathlib import Path

from meshwright.nn.files import checkpoint_files as files

# Ends the process, without a word to anyone, before the call numbered argv[2] that touches a file.
KILLED_WHILE_SAVING = """
import os, sys
from pathlib import Path
from meshwright.nn.files import checkpoint_files as files

directory, left, counts = Path(sys.argv[1]), int(sys.argv[2]), False

def kill(event, arguments):
    global left
    touches = event.split(".")[0] in ("open", "os", "shutil")
    if counts and touches and str(arguments[0] if arguments else "").startswith(str(directory)):
        left -= 1
        if left < 0:
            os._exit(9)

sys.addaudithook(kill)
for step in (1, 2, 3):
    partial = directory / ".saving" / str(step)
    (partial / "state").mkdir(parents=True)
    (partial / "state" / "w").write_text(str(step))
    (partial / "position.json").write_text('{"validation_loss": null}')
    counts = step == 3
    files.seal(partial)
    files.put_in_place(partial, directory)
    files.prune(directory, 2)
"""


def test_a_kill_before_any_system_call_of_a_save_leaves_whole_checkpoints(tmp_path: Path):
    ends: list[int] = []
    for number in range(60):
        directory = tmp_path / str(number)
        done = subprocess.run([sys.executable, "-c", KILLED_WHILE_SAVING, str(directory), str(number)])
        step, damaged = files.newest_sound(directory)
        assert damaged == []
        assert (directory / str(step) / "state" / "w").read_text() == str(step)
        assert {*files.checkpoint_steps(directory)} in ({1, 2}, {1, 2, 3}, {2, 3})
        ends.append(step)
        if done.returncode == 0:
            break
    assert done.returncode == 0 and ends[0] == 2 and ends[-1] == 3 and ends == sorted(ends)


def test_damaged_checkpoints_after_a_step_are_set_aside(tmp_path: Path):
    for step in (1, 2, 3):
        (tmp_path / str(step)).mkdir()
    files.set_aside(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2.damaged", "3.damaged"]
    assert files.checkpoint_steps(tmp_path) == [1]
