"""The share of idle devices in a run of post-training on two pools, simulated and measured: prints JSON.

    python benchmarks/post_training_idle.py > benchmarks/results/post_training_idle.json

A tiny model on 8 virtual devices of the CPU: 4 train, and 4 of another process roll out one update ahead. The
simulation has the mean seconds of each phase, as a plan has their prices. Measured are the seconds of whole
steps, with 256 and 128 rollouts. Target: within 10%. The first steps compile and are left out.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from meshwright.post_training.two_phases import idle_share

_STEPS, _LEFT_OUT, _SAMPLES = 24, 3, 8
_PROMPTS = (32, 16)
_LEARNING = ("score_seconds", "reward_seconds", "update_seconds")
_CHIPS = {"train": 4, "roll out": 4}
_REWARD = "def score(row, answer):\n    return float(answer == row['answer'])\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        start = _start(Path(name))
        runs = [_run(start, num_prompts) for num_prompts in _PROMPTS]
    document = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load": os.getloadavg()[0],
        "runs": runs,
    }
    print(json.dumps(document, indent=1))


def _run(start: list[str], num_prompts: int) -> dict[str, Any]:
    """The figures of a run with this number of prompts in a step."""
    lines = _lines(start, num_prompts)
    used = lines[_LEFT_OUT:-1]  # the last step starts no rollouts
    names = (*_LEARNING, "rollout_seconds", "message_seconds", "move_seconds")
    phases = {name: mean(line[name] for line in used) for name in names}
    busy = {"train": sum(phases[key] for key in _LEARNING), "roll out": phases["rollout_seconds"]}
    step, moving = mean(line["step_seconds"] for line in used), phases["move_seconds"]
    waiting = sum(_CHIPS[pool] * (step - moving - busy[pool]) for pool in _CHIPS)
    simulated = idle_share(_CHIPS, busy, moving, phases["message_seconds"])
    measured = waiting / (step * sum(_CHIPS.values()))
    return {
        "rollouts": num_prompts * _SAMPLES,
        "steps": len(used),
        "phases": phases,
        "simulated_step_seconds": max(busy["train"], busy["roll out"] + phases["message_seconds"]) + moving,
        "measured_step_seconds": step,
        "simulated_idle_share": simulated,
        "measured_idle_share": measured,
        "difference": simulated / measured - 1,
    }


def _start(folder: Path) -> list[str]:
    """The command line of a run, whose model has learned a little."""
    prompts, reward = folder / "prompts.jsonl", folder / "rewards.py"
    pairs = [f"{a}{b}" for a in range(10) for b in range(10)]
    rows = ({"prompt": f"{pair}>", "answer": "".join(sorted(pair))} for pair in pairs)
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward.write_text(_REWARD)
    for name, layout in (("plan", "fsdp=4"), ("plan.generate", "data=4")):
        _mw(
            *"plan train --model tiny --set vocab_size=257 --hardware cpu:4 --batch-tokens 2048 --seq-len 16 "
            f"--layout {layout},weights_dtype=f32,compute_dtype=f32 -o {folder / name}.toml".split()
        )
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"{pair}>{pair[::-1]}"}) + "\n" for pair in pairs * 30))
    _mw(*f"train {folder}/plan.toml --data {corpus} --run {folder}/start --steps 2".split())
    _mw("export", f"{folder}/start", "-o", f"{folder}/checkpoint")
    return (
        f"train {folder}/plan.toml --rl --from {folder}/checkpoint --data {prompts} --reward {reward}:score "
        f"--output-tokens 4 --samples {_SAMPLES} --kl 0.02 --steps {_STEPS} --staleness 1 "
        f"--apart --generate-plan {folder}/plan.generate.toml --run {folder}/run"
    ).split()


def _lines(start: list[str], num_prompts: int) -> list[dict[str, Any]]:
    """The metrics of a run on two pools."""
    run = f"{start[-1]}-{num_prompts}"
    _mw(*start[:-1], run, "--prompts", str(num_prompts))
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def _mw(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "meshwright", *arguments], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
