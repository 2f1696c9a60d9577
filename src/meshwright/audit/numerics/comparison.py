"""The numbers of a tiny plan's own code against the formulas (reference.py), in this process."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any, cast
from unittest.mock import patch

import jax
import numpy as np
from jax import Array
from jax._src import literals
from jax.experimental import pallas

from meshwright.audit.numerics import reference, reference_update
from meshwright.audit.numerics.rotations import rotation_check
from meshwright.audit.numerics.twin import CUDNN, INTERPRETED
from meshwright.audit.numerics.twin_checks import TwinCheck
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.layout.moves.attention import attention_layout, token_sharding
from meshwright.layout.moves.experts import has_fixed_rows
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import dimensions, parameters
from meshwright.nn.array_types import jax_dtype
from meshwright.nn.params import build, flatten, shardings, trained
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.plan_file import Plan
from meshwright.platforms import CPU, PLATFORMS, Platform
from meshwright.train.optimizers import OptimizerConfig
from meshwright.train.stage_step import training_step
from meshwright.train.step import CompiledStep

# Relative to a tensor's largest entry. Sums of some hundred terms differ by about ten roundings of 1.2e-7,
# and a gradient passes through a dozen such sums.
TOLERANCE = 1e-4
# Changes of weights have the rounding of weights, and Newton and Schulz's iterations enlarge differences.
_OF_UPDATES, _OF_MUON = 2e-3, 2e-2
# Times the tolerance of gradients and of updates for the delta rule, whose small keys enlarge roundings: the
# formulas' own gradients of a tiny Qwen3-Next differ by 4.6e-4 between float32 and float64.
_OF_DELTA, _OF_DELTA_UPDATES = 10, 10
# Logits of some hundreds, whose rounding is in the exponents.
_OF_PEAKS = 1e-2
# Nats of a generated token's log-probability.
_OF_TOKENS = 5e-4
# Relative to the spread of a tensor, for types of less than 16 bits: four bits round by up to a seventh.
_NARROW = 0.5
# Gradients below this share of the largest tensor's are rounding: the bias of keys has no gradient.
_NEGLIGIBLE = 1e-6
# Gradients that are zero but for rounding (the bias of keys) are measured against this share of the largest.
_OF_ZERO = 1e-3
# Entries below this share of a gradient's largest may have any sign, and some optimizers step by the sign.
_UNCERTAIN = 1e-4
# All updates are clipped and decay, with a denominator that does not hide the gradients' size. Rates are of
# the warm-up, the peak and the cosine.
_NUM_UPDATES = 3
_OPTIMIZER = OptimizerConfig(peak_learning_rate=1e-2, warmup_steps=1, total_steps=4, eps=1e-3, clip_norm=0.25)
# Terms that training adds to the loss: of the logits, and of routers.
_EXTRAS = reference.Extras(z=1e-3, balance=0.05, router_z=0.01)
# Factor of the weights before an activation that clamps at 7: many of its inputs then exceed the limit.
_BEFORE_CLAMP = 5.0
_INTO_ACTIVATIONS = ("w_gate", "w_in", "expert_gate", "expert_in")
_NUM_TOKENS, _PAGE = 10, 8
_PROMPTS = (1, 5, 17, 30)


def compared(plan: Plan, narrow: Plan | None, of_kernel: Plan | None = None) -> dict[str, Any]:
    """The report of a tiny plan.

    narrow: the same plan with narrow types, if it has any. of_kernel: `kernel_plan` of the planned model. If
    Pallas's interpreter refuses its kernel, `not_run` says why.
    """
    began = time.monotonic()
    is_trained = plan.workload.phase == "train"
    with jax.numpy_rank_promotion("allow"), _in_the_forms_of(load(plan.hardware).chip.platform):
        weights = _weights(plan.model)
        report = _training(plan, weights) if is_trained else _inference(plan, weights)
        report["checks"] += rotation_check(plan.model)
        if narrow:
            report["checks"] += (
                _narrow_training(narrow, weights) if is_trained else _narrow_inference(narrow, weights)
            )
        if of_kernel:
            try:
                report["checks"] += _with_kernels(of_kernel)
            except (NotImplementedError, TypeError, ValueError) as error:  # Pallas's, for missing operations
                report["not_run"] = f"the chips' attention kernel: {str(error).partition(chr(10))[0]}"
    checks = report.pop("checks")
    return {
        **report,
        "layout": str(plan.layout),
        "devices": plan.layout.mesh.num_devices,
        "agrees": all(check.agrees for check in checks),
        "tolerance": TOLERANCE,
        "seconds": round(time.monotonic() - began, 1),
        "checks": [check.to_dict() for check in checks],
    }


@contextmanager
def _in_the_forms_of(platform: Platform) -> Iterator[None]:
    """Within it code for CPUs takes the forms of the plan's platform that do not need its kernels."""
    forms = {name: getattr(platform, name) for name in _FORMS}
    PLATFORMS[CPU.name] = replace(CPU, **forms)
    try:
        yield
    finally:
        PLATFORMS[CPU.name] = CPU


@contextmanager
def _interpreted(platform: Platform) -> Iterator[None]:
    """Run the platform's attention kernels on CPUs in this context, by Pallas's interpreter or by XLA."""
    before = PLATFORMS[CPU.name]
    flash = platform.flash if platform.flash and platform.flash.name in INTERPRETED else None
    if flash and flash.name == CUDNN:
        flash = replace(flash, refusals=lambda attention: {})  # the planned attention is one that it takes
    PLATFORMS[CPU.name] = replace(before, flash=flash, paged=platform.paged)
    compiled_call, attend = pallas.pallas_call, jax.nn.dot_product_attention

    def attend_by_xla(*arguments: Any, **options: Any) -> Any:
        return attend(*arguments, **{**options, "implementation": "xla"})

    def interpreted_call(*arguments: Any, **options: Any) -> Any:
        return compiled_call(*arguments, **{**options, "interpret": True})

    # The interpreter of JAX 0.10.2 reads the shape of every stored value, and Python numbers have none.
    has_shape = patch.object(literals.TypedInt, "shape", (), create=True)
    try:
        by_xla = patch.object(jax.nn, "dot_product_attention", attend_by_xla)
        with has_shape, by_xla, patch.object(pallas, "pallas_call", interpreted_call):
            yield
    finally:
        PLATFORMS[CPU.name] = before


# Forms of programs, which XLA for CPU runs too.
_FORMS = (
    "page_by_page", "head_tokens", "joins_weights", "expert_blocks", "head_waits", "ordered_caches",
    "ordered_states", "ordered_gathers", "joins_inputs", "wide_logits", "one_sampler", "early_recompute",
    "lanes", "whole_sums",
)  # fmt: skip


def _weights(config: ModelConfig) -> dict[str, np.ndarray]:
    """Weights by path, none of them zeros or ones only, so that each of them shows."""
    rng, weights = np.random.default_rng(0), {}
    for path, param in parameters(config).items():
        sizes = dimensions(config, path)
        shape = param.shape(sizes)
        noise = rng.standard_normal(shape)
        if param.init == "normal" or param.init == "taps":
            noise = noise * (4.0 if config.delta and param.init == "taps" else 1.0)
            made = noise * np.prod([sizes[letter] for letter in param.fan_in]) ** -0.5
        elif param.init == "decay":
            made = rng.uniform(0.0, 1.0, shape)
        elif param.init == "slow_decay":
            made = rng.uniform(-7.0, -3.0, shape)
        else:
            made = (param.init == "ones") + 0.2 * noise
        weights[path] = np.asarray(made * _limit_factor(config, path), np.float32)
    return weights


def _limit_factor(config: ModelConfig, path: str) -> float:
    """Factor of a weight whose results are clamped or clipped, so that many exceed the limit."""
    name = path.rpartition("/")[2]
    if name == "wv" and config.clip_qkv:
        return config.clip_qkv
    return _BEFORE_CLAMP if config.activation == "clamped_silu" and name in _INTO_ACTIVATIONS else 1.0


def _tokens(config: ModelConfig, *shape: int, seed: int = 0) -> np.ndarray:
    """Token ids, half of them equal, so that some experts get more rows than they have capacity for."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, shape, dtype=np.int32)
    return np.where(rng.random(shape) < 0.5, np.int32(3), tokens)


# Training


def _training(plan: Plan, weights: Mapping[str, np.ndarray]) -> dict[str, Any]:
    config, layout = plan.model, plan.layout
    extras = _EXTRAS if config.moe else reference.Extras(z=_EXTRAS.z)
    optimizer = replace(
        _OPTIMIZER,
        optimizer=layout.precision.optimizer,
        peak_learning_rate=_OPTIMIZER.peak_learning_rate / (_OF_DELTA if config.delta else 1.0),
        z_loss=extras.z,
        balance_loss=extras.balance,
        router_z_loss=extras.router_z,
    )
    step = training_step(config, layout, plan.workload, optimizer, chip_flops_per_second=1.0)
    shape = plan.workload.num_sequences, plan.workload.seq_len + 1
    batches = [_tokens(config, *shape, seed=seed) for seed in range(_NUM_UPDATES)]
    tree = build(config, lambda path, _: weights[path])
    placed = _placement(step)
    reported, gradients, after = _after_updates(step, placed, tree, batches)
    loud = {path: _peaked(config, path, w) for path, w in weights.items()}
    [of_loud], *_ = _after_updates(step, placed, build(config, lambda path, _: loud[path]), batches[:1])

    differentiated = jax.jit(jax.value_and_grad(partial(_reference_loss, plan, extras=extras)))
    trained, fixed = _parts(config, weights)
    expected_reported, steps, expected_after = [], [], trained
    for number, batch in enumerate(batches):
        expected_loss, expected = differentiated(expected_after, fixed, batch)
        steps.append(_arrays(expected))
        norm, rate = reference_update.gradient_norm(steps[-1]), reference_update.rate(optimizer, number)
        expected_reported.append({"loss": float(expected_loss), "grad_norm": norm, "learning_rate": rate})
        expected_after = reference_update.updated(config, optimizer, expected_after, steps)
    expected_loud, _ = differentiated(*_parts(config, loud), batches[0])

    report = numerics_report(reported[0]["loss"], gradients, expected_reported[0]["loss"], steps[0])
    updates = _updates(weights, after, expected_after, steps)
    more_of_updates = _OF_DELTA_UPDATES if config.delta else 1.0
    tolerance = more_of_updates * (_OF_MUON if optimizer.optimizer == "muon" else _OF_UPDATES)
    worst = report["worst"]
    report["updates"] = [{"tensor": path, "difference": value} for path, value in updates.items()]
    report["checks"] = [
        TwinCheck("loss", report["loss"]["difference"], TOLERANCE),
        TwinCheck("gradients", worst["difference"], _of_gradients(config), worst["tensor"]),
        _worst("weights after three updates", updates, tolerance),
        _worst("metrics of three steps", _of_metrics(reported, expected_reported), tolerance),
        TwinCheck("loss of large logits", _relative(of_loud["loss"], float(expected_loud)), _OF_PEAKS),
    ]
    return report


def _of_gradients(config: ModelConfig) -> float:
    """The tolerance of a model's gradients."""
    return (_OF_DELTA if config.delta else 1.0) * TOLERANCE


def _of_metrics(
    reported: Sequence[Mapping[str, float]], expected: Sequence[Mapping[str, float]]
) -> dict[str, float | None]:
    """The largest relative difference of each metric over all steps."""
    return {
        name: max(
            (_relative(a[name], b[name]) for a, b in zip(reported, expected, strict=True)), key=_or_infinite
        )
        for name in expected[0]
    }


def _narrow_training(plan: Plan, weights: Mapping[str, np.ndarray]) -> list[TwinCheck]:
    """Loss and gradients in the plan's narrow types, which agree roughly."""
    report = _loss_and_gradients(plan, weights, by_spread=True)
    worst = report["worst"]
    return [
        TwinCheck("loss in narrow types", report["loss"]["difference"], _NARROW / 10),
        TwinCheck("gradients in narrow types", worst["difference"], _NARROW, worst["tensor"]),
    ]


def _with_kernels(plan: Plan) -> list[TwinCheck]:
    """The checks of a plan whose attention is by its chips' kernel."""
    platform, weights = load(plan.hardware).chip.platform, _weights(plan.model)
    name = "the chips' attention kernel"
    with _interpreted(platform):
        if plan.workload.phase != "train":
            return [
                replace(check, what=f"{check.what}, {name}") for check in _inference(plan, weights)["checks"]
            ]
        report = _loss_and_gradients(plan, weights)
    worst = report["worst"]
    return [
        TwinCheck(f"loss, {name}", report["loss"]["difference"], TOLERANCE),
        TwinCheck(f"gradients, {name}", worst["difference"], _of_gradients(plan.model), worst["tensor"]),
    ]


def _loss_and_gradients(
    plan: Plan, weights: Mapping[str, np.ndarray], *, by_spread: bool = False
) -> dict[str, Any]:
    """The report of one batch's loss and gradients. by_spread: as in `numerics_report`."""
    step = training_step(plan.model, plan.layout, plan.workload, _OPTIMIZER, chip_flops_per_second=1.0)
    batch = _tokens(plan.model, plan.workload.num_sequences, plan.workload.seq_len + 1)
    loss, gradients = step.whole_gradients(build(plan.model, lambda path, _: weights[path]), batch)
    trained, fixed = _parts(plan.model, weights)
    expected_loss, expected = jax.jit(jax.value_and_grad(partial(_reference_loss, plan)))(
        trained, fixed, batch
    )
    return numerics_report(loss, gradients, float(expected_loss), _arrays(expected), by_spread=by_spread)


def _parts(config: ModelConfig, weights: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the weights that are trained, the others)."""
    names = trained(config)
    return {path: w for path, w in weights.items() if path in names}, {
        path: w for path, w in weights.items() if path not in names
    }


def _reference_loss(
    plan: Plan,
    trained: Mapping[str, Any],
    fixed: Mapping[str, Any],
    rows: Any,
    extras: reference.Extras | None = None,
) -> Array:
    """The mean over microbatches, each with its own rows of the experts."""
    config, layout = plan.model, plan.layout
    weights, count = {**trained, **fixed}, layout.schedule.microbatches
    if not (config.moe and has_fixed_rows(layout)):
        return reference.mean_loss(config, weights, rows, None, extras)
    losses = []
    for number in range(count):
        of_rows = rows[number::count]
        capacity = reference.with_capacity(
            config.moe,
            layout.schedule.capacity or 1.0,
            _groups(layout, of_rows.shape[0], of_rows.shape[1] - 1),
        )
        losses.append(reference.mean_loss(config, weights, of_rows, capacity, extras))
    return sum(losses[1:], losses[0]) / count


def _groups(layout: Layout, batch: int, length: int) -> np.ndarray:
    """i32[B, T]: the device that holds each token; experts take rows in the order of devices."""
    gates = layout.activation("gates", "BTE")
    of_batch, of_length = (layout.mesh.size(gates.axes_of(letter)) for letter in "BT")
    attended = layout.mesh.size(token_sharding(attention_layout(layout), "tokens").axes_of("T"))
    pieces = np.split(np.arange(length), 2 * attended) if attended > 1 else [np.arange(length)]
    dealt = (
        [pieces[i] for n in range(attended) for i in (n, 2 * attended - 1 - n)] if attended > 1 else pieces
    )
    place = np.empty(length, int)
    place[np.concatenate(dealt)] = np.arange(length) * of_length // length
    return (np.arange(batch) * of_batch // batch)[:, None] * of_length + place


def _arrays(tree: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {path: np.asarray(array, np.float32) for path, array in tree.items()}


def _placement(step: Any) -> Callable[[Any], Any]:
    """A function from a tree of weights to the step's first state with them."""
    if isinstance(step, CompiledStep):
        first = jax.jit(step.first_state)
        where = shardings(step.config, step.layout, step.mesh)
        return lambda tree: first(jax.device_put(tree, where))
    saved = step.saved(step.init(0))
    of_optimizer = saved.opt_state

    def placed(tree: Any) -> Any:
        host = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), tree, saved.params)
        is_wide = step.layout.precision.master_weights
        state = of_optimizer._replace(weights=host) if is_wide else of_optimizer
        return step.placed(replace(saved, params=host, opt_state=state))

    return placed


def _after_updates(
    step: Any, placed: Callable[[Any], Any], tree: Any, batches: Sequence[np.ndarray]
) -> tuple[list[dict[str, float]], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(the metrics of each update, the first gradients, the weights after all updates), arrays by path."""
    gradients: dict[str, np.ndarray] = {}
    is_whole = isinstance(step, CompiledStep)
    reported: list[dict[str, float]] = []
    with jax.set_mesh(step.mesh) if is_whole else nullcontext():
        state = placed(tree)
    if is_whole:
        step.keeps_gradients = True
    else:  # the programs of stages are compiled once
        _, gradients = step.whole_gradients(tree, batches[0])
    for batch in batches:
        state, metrics = step.step(state, batch)
        reported.append({name: float(metrics[name]) for name in ("loss", "grad_norm", "learning_rate")})
        gradients = gradients or _arrays(flatten(cast(Any, metrics["gradients"])))
    return reported, _arrays(gradients), _arrays(flatten(step.saved(state).params))


def _peaked(config: ModelConfig, path: str, w: np.ndarray) -> np.ndarray:
    """A weight such that scores and logits exceed the largest exponent of float32."""
    name = path.rpartition("/")[2]
    largest = 300.0
    if name == "final_norm" and config.norm_scale:
        return w * largest
    return w * largest if name in ("wq", "wq_up") and not config.qk_norm else w


def _updates(
    before: Mapping[str, np.ndarray],
    after: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    gradients: Sequence[Mapping[str, np.ndarray]],
) -> dict[str, float | None]:
    """The differences of all updates by path, where gradients are more than rounding."""
    largest = max(float(np.abs(one).max()) for g in gradients for one in g.values())
    rows: dict[str, float | None] = {}
    for path in expected:
        change = expected[path] - before[path]
        scale = float(np.abs(change).max())
        certain = np.ones(change.shape, bool)
        for g in gradients:
            certain &= np.abs(g[path]) >= max(_UNCERTAIN * np.abs(g[path]).max(), _NEGLIGIBLE * largest)
        still = all(np.abs(g[path]).max() < _NEGLIGIBLE * largest for g in gradients)
        if still or not certain.any() or not scale:
            continue
        rows[path] = _finite(np.abs(after[path] - expected[path])[certain].max() / scale)
    return rows


# Inference


def _inference(plan: Plan, weights: Mapping[str, np.ndarray]) -> dict[str, Any]:
    differences = {
        f"prompt of {len(prompt)}": _largest_errors(errors)
        for prompt, errors in _errors_by_prompt(plan, weights)
    }
    first, others = ({name: pair[i] for name, pair in differences.items()} for i in (0, 1))
    return {
        "requests": [
            {"request": name, "prefill": pair[0], "generation": pair[1]} for name, pair in differences.items()
        ],
        "checks": [
            _worst("prefill", first, _OF_TOKENS),
            _worst(f"{_NUM_TOKENS - 1} steps of generation", others, _OF_TOKENS),
        ],
    }


def _narrow_inference(plan: Plan, weights: Mapping[str, np.ndarray]) -> list[TwinCheck]:
    """Log-probabilities in the plan's narrow types: the errors' root mean square over the spread."""
    errors, spreads = [], []
    for _, errors_of_tokens in _errors_by_prompt(plan, weights):
        for error, expected in errors_of_tokens:
            errors.append(error)
            spreads.append(expected - expected.mean())
    size, spread = (np.sqrt(np.mean(np.concatenate(rows) ** 2)) for rows in (errors, spreads))
    return [TwinCheck("tokens in narrow types", _finite(float(size / spread)), _NARROW)]


def _scores_by_prompt(plan: Plan, weights: Mapping[str, np.ndarray]) -> list[tuple[list[int], list[Any]]]:
    """Each prompt, with the scores of the tokens that the engine generates for it, all at the same time."""
    from meshwright.nn.products.quantised import as_read
    from meshwright.serve.device.runner import JaxRunner
    from meshwright.serve.engine.engine import Engine
    from meshwright.serve.engine.request import NUM_TOP, Request, SamplingParams

    config, layout = plan.model, plan.layout.replace(capacity=None).at("generate")
    mesh = device_mesh(layout)
    read = as_read(layout)
    dtype = jax_dtype(read.precision.weights_dtype)
    tree = build(config, lambda path, _: weights[path].astype(dtype))
    params = jax.device_put(tree, shardings(config, read, mesh))
    replicas = layout.data * layout.fsdp * max(layout.word("context"), 1)
    runner = JaxRunner(
        params, config, layout, mesh,
        num_slots=2 * replicas, context=48, page_size=_PAGE, chunk=16 * replicas, block=_PAGE,
        with_native=False,
    )  # fmt: skip
    runner.warm_up(only_greedy=True)
    prompts = [_tokens(config, length, seed=length).tolist() for length in _PROMPTS]
    sampling = SamplingParams(temperature=0.0, top_logprobs=NUM_TOP)

    async def scores(engine: Engine, prompt: list[int]) -> list[Any]:
        request = Request(tuple(prompt), _NUM_TOKENS, sampling)
        return [event.score async for event in engine.submit(request)]

    async def answers(engine: Engine) -> list[Any]:
        return await asyncio.gather(*(scores(engine, prompt) for prompt in prompts))

    with Engine(runner) as engine:
        return list(zip(prompts, asyncio.run(answers(engine)), strict=True))


# For each token: errors of the log-probabilities of its likeliest alternatives, and the formulas' f32[V].
_TokenErrors = list[tuple[np.ndarray, np.ndarray]]


def _errors_by_prompt(plan: Plan, weights: Mapping[str, np.ndarray]) -> list[tuple[list[int], _TokenErrors]]:
    """Each prompt, with the errors of the tokens that the engine generates for it."""
    pairs = _scores_by_prompt(plan, weights)
    rows = [[*prompt, *(score.token for score in scores)] for prompt, scores in pairs]
    longest = max(map(len, rows))
    # No position depends on later ones: with all rows padded to one length the formulas are compiled once.
    tokens = np.asarray([row + [0] * (longest - len(row)) for row in rows], np.int32)
    log_shares = jax.jit(lambda w, t: jax.nn.log_softmax(reference.logits(plan.model, w, t), axis=-1))
    expected = np.asarray(log_shares(weights, tokens))
    return [
        (prompt, [_token_errors(score, row[len(prompt) - 1 + n]) for n, score in enumerate(scores)])
        for (prompt, scores), row in zip(pairs, expected, strict=True)
    ]


def _token_errors(score: Any, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(errors of the reported log-probabilities and of the choice, expected log-probabilities f32[V])."""
    pairs = [(score.token, score.logprob), *score.top]
    ids, given = np.asarray([token for token, _ in pairs]), np.asarray([nats for _, nats in pairs])
    # The token must be the likeliest, and the reported ones the likeliest of all.
    missed = expected.max() - expected[score.token]
    return np.append(given - expected[ids], missed), expected


def _largest_errors(errors: _TokenErrors) -> tuple[float | None, float | None]:
    """The largest errors of the first token, and of the others, in nats."""
    largest = [np.abs(error).max() for error, _ in errors]
    return _finite(float(largest[0])), _finite(float(max(largest[1:], default=0.0)))


# Reports


def numerics_report(
    loss: float,
    gradients: Mapping[str, Any],
    expected_loss: float,
    expected: Mapping[str, Any],
    *,
    by_spread: bool = False,
) -> dict[str, Any]:
    """The report of two runs: arrays by path, as computed and as expected.

    by_spread: differences are root mean squares over the tensor's, not the largest over the largest.
    """
    sizes = {path: _size(one, by_spread) for path, one in expected.items()}
    largest, rows = max(sizes.values()), []
    for path, size in sizes.items():
        error = _size(gradients[path] - expected[path], by_spread)
        rows.append({"tensor": path, "difference": _finite(error / max(size, _OF_ZERO * largest))})
    difference = _relative(loss, expected_loss)
    worst = max(rows, key=lambda row: _or_infinite(row["difference"]))
    return {
        "agrees": max(map(_or_infinite, (difference, worst["difference"]))) <= TOLERANCE,
        "tolerance": TOLERANCE,
        "loss": {"layout": _finite(loss), "one_device": _finite(expected_loss), "difference": difference},
        "gradients": rows,
        "worst": worst,
    }


def _size(x: np.ndarray, by_spread: bool) -> float:
    return float(np.sqrt(np.mean(x**2)) if by_spread else np.abs(x).max())


def _worst(what: str, differences: Mapping[str, float | None], tolerance: float) -> TwinCheck:
    name = max(differences, key=lambda name: _or_infinite(differences[name]))
    return TwinCheck(what, differences[name], tolerance, name)


def _relative(value: float, expected: float) -> float | None:
    return _finite(abs(value - expected) / max(abs(expected), 1e-30))


def _finite(value: float) -> float | None:
    """A number for JSON; None for inf and nan."""
    return float(value) if isfinite(value) else None


def _or_infinite(value: float | None) -> float:
    return float("inf") if value is None else value
