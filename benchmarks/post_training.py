"""Seconds to plan post-training and its reshard, and the reshard's bytes as compiled: prints JSON.

    python benchmarks/post_training.py > benchmarks/results/post_training.json

qwen3-32b on 256 H100s, 512 prompts with 16 rollouts of 4,096 tokens; weights from fsdp=64 to eight replicas
of tensor=8. CPU seconds of one core. Targets: 5 s for both forms, 100 ms for the reshard, emitted bytes
within 2% of the planned ones.
"""

import json
import os
import platform
import time

from meshwright.api.inputs import SearchOptions
from meshwright.audit.compile.targets import choose_target
from meshwright.audit.moved_weights import ReshardJob, audit_reshard
from meshwright.cost.weights_move import weights_move
from meshwright.hardware import catalog
from meshwright.layout import Layout
from meshwright.models.presets import load_model
from meshwright.post_training.two_phases import Question, apart, together
from meshwright.post_training.work import PostTraining

MODEL = "qwen3-32b"


def main() -> None:
    config, machine, smaller = load_model(MODEL), catalog.load("h100:32x8"), catalog.load("h100:8x8")
    before, after = (Layout.parse(text, weights_dtype="bf16") for text in ("fsdp=64", "data=8,tensor=8"))
    started = time.process_time()
    move = weights_move(config, before, after, smaller)
    reshard_seconds = time.process_time() - started
    audited = audit_reshard(
        ReshardJob(config, before, after, smaller.spec), choose_target(smaller.spec, before, "cpu")
    )
    work = PostTraining(prompts=512, prompt_tokens=1024, output_tokens=4096, samples=16)
    asked = Question(config, machine, work, *SearchOptions(weights_dtype=None).dtypes(machine.chip))
    started = time.process_time()
    forms = list(together(asked))
    together_seconds = time.process_time() - started
    forms += apart(asked, forms[0])
    both_seconds = time.process_time() - started
    document = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load": os.getloadavg()[0],
        "reshard_seconds": reshard_seconds,
        "reshard_sent_bytes": round(move.sent_bytes),
        "audit": audited,
        "together_seconds": together_seconds,
        "both_seconds": both_seconds,
        "step_seconds": {step.form: step.seconds for step in forms},
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
