"""The extras of the package: modules, purpose and the command that installs them. Planning needs none."""

from dataclasses import dataclass
from importlib.util import find_spec

from meshwright.errors import DeviceError


@dataclass(frozen=True)
class _Extra:
    """One extra of the package.

    modules: its modules; the extra counts as installed if the first is. purpose: uses that need the extra.
    """

    name: str
    modules: tuple[str, ...]
    purpose: str

    @property
    def is_installed(self) -> bool:
        try:
            return find_spec(self.modules[0]) is not None
        except ModuleNotFoundError:  # the package of the module is not installed either
            return False

    @property
    def install(self) -> str:
        """The command that installs it.

        >>> EXTRAS[0].install
        "pip install 'meshwright[run]'"
        """
        return f"pip install 'meshwright[{self.name}]'"

    def missing(self, module: str) -> str:
        """The message for a use that needs the extra."""
        return f"this needs the extra [{self.name}] ({module} is not installed): {self.install}"


# Extras that include others come after them, so that the smallest is found for a module.
EXTRAS = (
    _Extra(
        "run",
        (
            "jax",
            "jaxlib",
            "optax",
            "orbax",
            "grain",
            "safetensors",
            "tokenizers",
            "prometheus_client",
            "yaml",
            "absl",
        ),
        "training, audits, measurements",
    ),
    _Extra(
        "serve",
        ("starlette", "uvicorn", "httptools", "pydantic", "httpx", "llguidance"),
        "mw serve and mw bench serve",
    ),
    _Extra("tpu", ("libtpu",), "training on TPUs, and audits by the TPU's compiler"),
    _Extra("cuda12", ("jax_cuda12_plugin",), "training on NVIDIA GPUs, and audits by the GPU's compiler"),
    _Extra("ray", ("ray",), "several replicas of a server"),
    _Extra("otel", ("opentelemetry.exporter.otlp.proto.http", "opentelemetry"), "traces of served requests"),
    _Extra("hf", ("transformers",), "comparing with Hugging Face"),
    _Extra("parquet", ("pyarrow",), "training on .parquet files"),
    _Extra("mcp", ("mcp",), "mw mcp"),
    _Extra("demo", ("openai",), "the last stage of mw demo"),
)


def require(name: str) -> None:
    """Raise DeviceError with the command that installs the extra, if it is missing.

    For commands that would otherwise notice only in another process.
    """
    extra = next(extra for extra in EXTRAS if extra.name == name)
    if not extra.is_installed:
        raise DeviceError(extra.missing(extra.modules[0]))


def bringing(module: str) -> _Extra | None:
    """The extra that has a module, `jax.numpy` as well as `jax`; None if none does."""
    top = module.partition(".")[0]
    return next((extra for extra in EXTRAS if top in extra.modules), None)
