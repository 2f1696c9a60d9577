"""Servers as processes: a checkpoint for them, and which of Ray's are theirs."""

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.serve.mock import byte_tokenizer


def save_checkpoint(folder: Path, max_position_embeddings: int = 128) -> Path:
    """A LLaMA of two small layers that knows bytes, in a folder of that name."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch", reason="torch writes the checkpoint")
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_position_embeddings,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def is_below(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        pid = int(re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0])
    return False


def server_pids(process: subprocess.Popen[str], deployment: str = "servers") -> list[int]:
    """The processes of the servers of a deployment, which Ray names."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_bytes()
            is_server = name.startswith(f"ray::ServeReplica:meshwright:{deployment}".encode())
            if is_server and is_below(int(folder.name), process.pid):
                found.append(int(folder.name))
        except OSError:  # it has just ended
            continue
    return found


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not come to pass"
        time.sleep(0.1)
