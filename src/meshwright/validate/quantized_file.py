"""Records of published files of mixtures of experts: the matrices that they keep wide."""

from dataclasses import dataclass
from functools import lru_cache

from meshwright.models.config import ModelConfig
from meshwright.models.config_tables import Unquantised
from meshwright.models.families import load_family
from meshwright.models.unquantised import unquantised
from meshwright.records import Folder, Record


@dataclass(frozen=True)
class QuantizedFile(Record):
    """A published file of quantised weights.

    models: presets with such a file. quant_algo: ModelOpt's name of the narrow type. wide: the modules that
    the file keeps wide, as in its list (`ignore` or `exclude_modules`), without the numbers of layers if it
    names all.
    """

    models: tuple[str, ...] = ()
    quant_algo: str = ""
    wide: tuple[str, ...] = ()


QUANTIZED_FILES = Folder(QuantizedFile, "validate.quantized_files", "file of quantised weights")


@lru_cache(maxsize=256)
def wide_weights(config: ModelConfig, dtype: str) -> tuple[Unquantised, ...] | None:
    """The matrices that the published file of a model in this dtype keeps wide; None if no record has it."""
    for file in QUANTIZED_FILES.records:
        if config.name in file.models and config.family:
            declared = {"quant_algo": file.quant_algo, "ignore": list(file.wide)}
            wide = unquantised({"quantization_config": declared}, config, load_family(config.family))
            if all(matrix.dtype == dtype for matrix in wide):
                return wide
    return None
