"""Published settings of load tests, which their tables leave out.

`load_test_recipes.csv` has a line for each load that InferenceX's searches with pools apart list: workers and
devices of both pools, whether attention is data-parallel within a worker, the sequences that a decode group
holds at once (0: not stated), and the draft tokens of a step. `benchmarks/load_test_recipes.py` makes it from
a checkout of InferenceX (Apache-2.0). It has settings and no measured figure.

`one_pool_recipes.csv` has the searches with one pool, for models for which some search has draft tokens: the
engine's version, a worker's devices, whether each has sequences of its own, whether devices hold whole
experts, the draft tokens of a step, and the numbers of concurrent requests. The same script makes it with
`--one-pool`.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from meshwright.validate.load_test_row import LoadTestRow, WorkerDegrees

_PATH = Path(__file__).with_name("load_test_recipes.csv")
_ONE_POOL_PATH = Path(__file__).with_name("one_pool_recipes.csv")
_NUM_KEYS = 7


@dataclass(frozen=True)
class PoolRecipe:
    """The workers of a pool, of `chips` devices each.

    is_data_parallel: each device of a worker has sequences of its own; otherwise its devices split heads.
    """

    workers: int
    chips: int
    is_data_parallel: bool

    @property
    def degrees(self) -> WorkerDegrees:
        """The degrees of a worker: attention by sequences and whole experts, or attention by heads."""
        if self.is_data_parallel:
            return WorkerDegrees(tensor=1, data=self.chips, expert_tensor=1, expert=self.chips)
        return WorkerDegrees(tensor=self.chips, data=1, expert_tensor=1, expert=1)


@dataclass(frozen=True)
class Recipe:
    """The settings of one load test.

    decode_batch: sequences of a group of devices at once; 0 if not stated. drafts: draft tokens of a step.
    """

    prefill: PoolRecipe
    decode: PoolRecipe
    decode_batch: int
    drafts: int

    @property
    def slots(self) -> int | None:
        """Requests that all decode workers hold at once; None if not stated."""
        groups = self.decode.workers * (self.decode.chips if self.decode.is_data_parallel else 1)
        return groups * self.decode_batch or None

    @property
    def num_chips(self) -> int:
        return sum(pool.workers * pool.chips for pool in (self.prefill, self.decode))


def recipes_of(row: LoadTestRow, model: str) -> tuple[Recipe, ...]:
    """The recipes that a row of this model may have run; none if the list does not have its load.

    Some tables count the devices of both pools in the column of each pool.
    """
    if row.mode != "apart" or row.concurrency is None:
        return ()
    chip = row.hardware.partition(":")[0]
    key = (row.engine, chip, model, row.weight_dtype, row.prompt_len, row.output_len, row.concurrency)
    prefill_workers, decode_workers = row.prefill_workers, row.decode_workers
    prefill, decode = (degrees.chips for _, degrees in row.pools())
    return tuple(
        recipe
        for recipe in _recipes().get(tuple(map(str, key)), ())
        if prefill_workers in (None, recipe.prefill.workers)
        and decode_workers in (None, recipe.decode.workers)
        and (
            (recipe.prefill.chips, recipe.decode.chips) == (prefill, decode)
            or prefill == decode == recipe.num_chips
        )
    )


@lru_cache(maxsize=1)
def _recipes() -> Mapping[tuple[str, ...], list[Recipe]]:
    recipes: defaultdict[tuple[str, ...], list[Recipe]] = defaultdict(list)
    for line in _PATH.read_text(encoding="utf-8").splitlines()[1:]:
        cells = line.split(",")
        pools = [int(cell) for cell in cells[_NUM_KEYS:]]
        prefill, decode = (
            PoolRecipe(workers, chips, bool(data)) for workers, chips, data in (pools[:3], pools[3:6])
        )
        recipes[tuple(cells[:_NUM_KEYS])].append(Recipe(prefill, decode, *pools[6:]))
    return recipes


def one_pool_drafts(row: LoadTestRow, model: str) -> int:
    """Draft tokens of a step in the searches with one pool that have the load of `row`; 0 if none has.

    Only searches with the row's version of the engine count. If they differ, the least number is taken: the
    tables do not state it.
    """
    if row.mode != "together" or row.concurrency is None:
        return 0
    [(_, degrees)] = row.pools()
    settings = (degrees.chips, int(degrees.data > 1), int(degrees.expert > 1))
    chip, lengths = row.hardware.partition(":")[0], (row.prompt_len, row.output_len)
    key = (row.engine, chip, model, row.weight_dtype, *lengths)
    stated = (row.engine_version, settings)
    fits = (
        recipe.drafts
        for recipe in _one_pool_recipes().get(tuple(map(str, key)), [])
        if (recipe.version, recipe.settings) == stated and row.concurrency in recipe.concurrencies
    )
    return min(fits, default=0)


@dataclass(frozen=True)
class _OnePoolRecipe:
    """Settings of load tests with one pool.

    settings: a worker's devices, whether each has sequences of its own, and whether devices hold whole
    experts.
    """

    version: str
    settings: tuple[int, ...]
    drafts: int
    concurrencies: frozenset[int]


@lru_cache(maxsize=1)
def _one_pool_recipes() -> Mapping[tuple[str, ...], list[_OnePoolRecipe]]:
    recipes: defaultdict[tuple[str, ...], list[_OnePoolRecipe]] = defaultdict(list)
    for line in _ONE_POOL_PATH.read_text(encoding="utf-8").splitlines()[1:]:
        engine, version, *cells = line.split(",")
        *settings, drafts = map(int, cells[5:9])
        concurrencies = frozenset(map(int, cells[9].split()))
        recipe = _OnePoolRecipe(version, tuple(settings), drafts, concurrencies)
        recipes[engine, *cells[:5]].append(recipe)
    return recipes
