"""What must hold for a program: results, exact gradients, and the mean and spread of coded ones."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxcomp as jc
from tests.fuzz.programs import Function, Program, X, around, seen

Array = Any
Z = "z"  # name of the array of the second call

SEEDS, MORE_SEEDS = 64, 512
SIGMAS = 5.0
LARGEST_ERROR = 0.4  # of one draw, as a fraction of the gradient's norm
LARGEST_AMPLIFICATION = 5.0  # of what noise in the arguments does
NOISE = 0.1  # of a standard deviation
# A code's error may have a mean of this part of the gradient's norm: decoded values are unbiased to
# 2^-17, and an activation function of one code has derivatives with a bias of up to 0.004.
LEAST_BIAS, LEAST_BIAS_OF_UNITS = 2.0**-15, 0.004


@dataclasses.dataclass(frozen=True)
class Failure:
    """What does not hold: a kind, which a smaller program keeps, and the numbers."""

    kind: str
    policy: str
    detail: str


def _for_any_size(spec: str) -> jc.Policy:
    """A recipe that encodes small values, too, and may match nothing."""
    policy = jc.policies.from_spec(spec)
    rules = [dataclasses.replace(r, min_size=0, required=False) for r in policy.rules]
    return dataclasses.replace(policy, rules=tuple(rules))


# Without excess precision, and without the fusions that round in another way.
AS_WRITTEN: tuple[dict[str, Any], ...] = (
    {"xla_allow_excess_precision": False},
    {"xla_allow_excess_precision": False, "xla_disable_hlo_passes": "fusion"},
)
EXACT: dict[str, Any] = {
    "Exact()": jc.Exact(),
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "keep": jc.Policy((jc.Rule("keep", required=False),)),
    "cheapest": jc.Policy((jc.Rule("cheapest", required=False),)),
}
CODED: dict[str, Any] = {
    "Quantize(4)": jc.Quantize(4),
    "automatic": _for_any_size("automatic"),
    "Quantize(8)": jc.Quantize(8),
    "fused:bits=4": _for_any_size("fused:bits=4"),
    "Float8()": jc.Float8(),
    "automatic:bits=8": _for_any_size("automatic:bits=8"),
}


def gradient_of(
    program: Program, call: Function, calls: int
) -> Callable[[dict[str, Array]], tuple[dict[str, Array], list[Array]]]:
    """A function of all arguments: the gradient of a loss by name, and the results of its calls.

    The second call has another array, and other arguments are differentiated in it.
    """
    sets = [program.first, [Z if name == X else name for name in program.second]][:calls]
    names = sorted({name for chosen in sets for name in chosen})

    def run(values: dict[str, Array]) -> tuple[dict[str, Array], list[Array]]:
        def loss(moving: dict[str, Array]) -> tuple[Array, list[Array]]:
            every = values | moving
            total, results = jnp.float32(0), []
            for number, chosen in enumerate(sets):
                given = {n: v if n in chosen else lax.stop_gradient(v) for n, v in every.items()}
                x, z = given.pop(X), given.pop(Z)
                result = call(given, z if number else x)
                rng = np.random.default_rng((program.seed, 7, number))
                cotangent = jnp.asarray(rng.normal(size=result.shape), jnp.float32)
                total = total + (result.astype(total.dtype) * cotangent).sum()
                results.append(result)
            return total, results

        return jax.grad(loss, has_aux=True)({name: values[name] for name in names})

    return run


def arguments(program: Program) -> dict[str, np.ndarray]:
    return program.arguments() | {Z: program.input(1)}


def _stock(program: Program, dtype: Any = None) -> Function:
    return around(program, program.function(dtype))


def _coded(program: Program, policy: Any, seed: Any = None) -> Function:
    inner = jc.checkpoint(program.function(None, policy, seed), policy, seed=seed)
    return around(program, inner, policy, seed)


def _as_float(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float64), tree)


def reference(program: Program, calls: int, values: dict[str, np.ndarray]) -> Any:
    """The gradient in float64, at arguments rounded to the program's dtype."""
    rounded = {
        n: v.astype(jnp.dtype(program.dtype)).astype(np.float64)
        if jnp.issubdtype(v.dtype, jnp.inexact) else v
        for n, v in values.items()
    }  # fmt: skip
    with jax.enable_x64(True):
        run = gradient_of(program, _stock(program, jnp.float64), calls)
        return _as_float(jax.jit(run)(rounded)[0])


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x))


def _along(found: np.ndarray, true: np.ndarray) -> float:
    """The part of an error that lies along the gradient."""
    return float(((found - true) * true).sum() / ((true * true).sum() + 1e-300))


class NotFinite(Exception):
    """The program overflows without jaxcomp."""


def stock_gradient(
    program: Program, calls: int, values: dict[str, np.ndarray]
) -> tuple[Callable[..., Any], Any, Any]:
    """The compiled gradient of the program as it is, and what it gives.

    Raises:
        NotFinite: A number is not finite.
    """
    run = jax.jit(gradient_of(program, _stock(program), calls))
    gradient, results = run(values)
    if not all(np.isfinite(x).all() for x in _as_float(jax.tree.leaves((gradient, results)))):
        raise NotFinite
    return run, gradient, results


def check_exact(program: Program, name: str, calls: int) -> list[Failure]:
    """Results are bit-equal to stock's, and the gradient is as near to the true one as stock's."""
    values = arguments(program)
    stock_run, expected, results = stock_gradient(program, calls, values)
    kind = "exact" if calls == 1 else "exact, two calls"
    try:
        run = gradient_of(program, _coded(program, EXACT[name]), calls)
        found, made = jax.jit(run)(values)
    except Exception as error:
        return [_of_error(error, name, calls)]
    failures = _different_results(program, made, results, name, (run, stock_run), values)
    eps = float(jnp.finfo(program.dtype).eps)
    found, expected = _as_float(found), _as_float(expected)
    whole = sum(map(_norm, expected.values()))
    is_narrow = eps > 2.0**-20
    true = reference(program, calls, values) if is_narrow else None
    for leaf, stock in expected.items():
        size = _norm(stock)
        if true is None and _norm(found[leaf] - stock) <= 4 * eps * size:
            continue
        true = reference(program, calls, values) if true is None else true
        ours, usual = _norm(found[leaf] - true[leaf]), _norm(stock - true[leaf])
        told = f"{leaf}: error {ours:.3g}, stock's {usual:.3g}, norm {size:.3g}"
        if not ours <= 3 * usual + 8 * eps * size + 0.1 * eps * whole:
            if usual > 10 * _norm(true[leaf]):
                continue  # stock's is rounding noise alone, as that of a norm of equal values
            is_zero = _norm(found[leaf]) == 0
            failures.append(Failure(f"{kind}{', zero' * is_zero}", name, told))
            continue
        # A factor that is rounded alike for all elements, hidden in the rounding of each of them.
        along, usual_along = (_along(one[leaf], true[leaf]) for one in (found, expected))
        square = true[leaf] ** 2
        number = square.sum() ** 2 / ((square**2).sum() + 1e-300)  # of elements that count
        chance = 5 * usual / (size * number**0.5 + 1e-300)
        if number > 16 and chance < 0.1 and abs(along) > 3 * abs(usual_along) + chance + 0.1 * eps:
            told = f"{leaf}: {along:+.3g} along the gradient, stock's {usual_along:+.3g}"
            failures.append(Failure(f"{kind}, mean", name, told))
    return failures


def check_steps(program: Program, name: str, calls: int) -> list[Failure]:
    """Step by step, without XLA's fusions, the gradient is that of `jax.checkpoint` to the bit.

    Where three cotangents or more are added, the order may be another: up to two units in the last
    place of the largest element. A leaf that is a sum with cancellation moves further, but not
    further than its own rounding error, or than rounding of the arguments moves it.
    """
    values = arguments(program)
    stock = around(program, jax.checkpoint(program.function(None)))
    with jax.disable_jit():
        expected = _as_float(gradient_of(program, stock, calls)(values)[0])
        if not all(np.isfinite(leaf).all() for leaf in expected.values()):
            raise NotFinite
        try:
            ours = gradient_of(program, _coded(program, EXACT[name]), calls)(values)[0]
        except Exception as error:
            return [_of_error(error, name, calls)]
    true, failures = None, []
    moved: dict[str, float] = {}
    for leaf, found in _as_float(ours).items():
        distance, largest = (np.abs(x).max() for x in (found - expected[leaf], expected[leaf]))
        unit = float(jnp.finfo(program.dtype).eps) * largest
        if distance <= 2 * unit:
            continue
        true = reference(program, calls, values) if true is None else true
        if distance <= 2 * np.abs(expected[leaf] - true[leaf]).max():
            continue
        if not moved:
            eps = float(jnp.finfo(program.dtype).eps)
            with jax.disable_jit():
                run = gradient_of(program, stock, calls)
                moved = _errors_of_noisy_arguments(run, program.seed, values, expected, eps)
        if distance > 2 * moved[leaf]:
            failures.append(Failure("steps", name, f"{leaf}: {distance / unit:.3g} units"))
    return failures


def _different_results(
    program: Program,
    ours: Any,
    results: Any,
    name: str,
    runs: Sequence[Callable[..., Any]],
    values: Any,
) -> list[Failure]:
    """Compares bits; where XLA may have fused two programs in two ways, those of results alone.

    XLA may also divide what is computed outside of a `jax.shard_map` over its devices, and adds the
    parts of a sum. In a loop it may give a matrix another layout, in which some CPUs multiply it in
    another order. Results then differ by a few units in the last place.
    """
    if _same_bits(ours, results):
        return []
    for options in AS_WRITTEN:
        ours, results = (_results_alone(function, values, options) for function in runs)
        if _same_bits(ours, results):
            return []
    pairs = zip(*map(_as_float, (ours, results)), strict=True)
    most = max(_norm(a - b) / _norm(b) for a, b in pairs)
    rearranged = any(f"{wrapper}(" in str(program) for wrapper in ("shard_map", "scan", "map"))
    if rearranged and most <= 4 * float(jnp.finfo(program.dtype).eps):
        return []
    return [Failure("results", name, f"differ by {most:.3g} of their norm")]


def _same_bits(ours: Any, results: Any) -> bool:
    return all(
        a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b))
        for a, b in zip(ours, results, strict=True)
    )


def _results_alone(
    function: Callable[..., Any], values: dict[str, np.ndarray], options: dict[str, Any]
) -> Any:
    """The results of the calls as the forward pass of a gradient computes them."""
    return jax.jit(lambda values: function(values)[1], compiler_options=options)(values)


def _of_error(error: Exception, name: str, calls: int) -> Failure:
    text = f"{type(error).__name__}: {str(error)[:300]}"
    return Failure(f"{type(error).__name__}{', two calls' * (calls - 1)}", name, text)


def check_coded(program: Program, name: str, calls: int) -> list[Failure]:
    """Results are bit-equal to stock's; draws of the gradient scatter around it, not too far."""
    values = arguments(program)
    stock_run, expected, results = stock_gradient(program, calls, values)
    policy = CODED[name]
    kind = "" if calls == 1 else ", two calls"
    given = {n: v for n, v in values.items() if n not in (X, Z)}

    @jax.jit
    def draws(seeds: Array) -> Any:
        run = lambda seed: gradient_of(program, _coded(program, policy, seed), calls)(values)  # noqa: E731
        return lax.map(run, seeds)

    try:
        plan = jc.checkpoint(program.function(policy=policy), policy).plan(
            given, seen(program, values[X])
        )
        drawn, ours = draws(jnp.arange(1, 1 + SEEDS, dtype=jnp.uint32))
    except Exception as error:
        return [_of_error(error, name, calls)]
    runs = gradient_of(program, _coded(program, policy), calls), stock_run
    failures = _different_results(program, [y[0] for y in ours], results, name, runs, values)
    drawn, expected = _as_float(drawn), _as_float(expected)
    if any("bias" in value.note for value in plan.values) or any("bias" in n for n in plan.notes):
        return failures
    eps = float(jnp.finfo(program.dtype).eps)
    units = any(value.op for value in plan.values)
    least = max(LEAST_BIAS_OF_UNITS if units else LEAST_BIAS, 8 * eps)
    usual = _errors_of_noisy_arguments(stock_run, program.seed, values, expected)
    # A gradient may be zero but for rounding, such as that of a scale before a norm. Codes are not
    # compared with it alone.
    of_loss = sum(result.size for result in results) ** 0.5
    sizes = {leaf: max(_norm(exact), 0.02 * of_loss) for leaf, exact in expected.items()}
    squares = sum(
        ((drawn[leaf] - exact) ** 2).reshape(SEEDS, -1).sum(1) for leaf, exact in expected.items()
    )
    spread, size = float(np.sqrt(squares).mean()), math.hypot(*map(_norm, expected.values()))
    moved = math.hypot(*usual.values())
    is_wide = spread > LARGEST_ERROR * max(size, 0.25 * of_loss) + LARGEST_AMPLIFICATION * moved
    suspects = [
        leaf
        for leaf, exact in expected.items()
        if _most_sigmas(drawn[leaf] - exact, exact, least * sizes[leaf]) > SIGMAS
    ]
    if not is_wide and not suspects:
        return failures
    true = reference(program, calls, values)
    rounding = {leaf: _norm(exact - true[leaf]) for leaf, exact in expected.items()}
    if is_wide and math.hypot(*rounding.values()) < 0.1 * size:
        told = f"error {spread:.3g}, norm {size:.3g}, with noisy arguments {moved:.3g}"
        failures.append(Failure("spread" + kind, name, told))
    if not suspects:
        return failures
    more, _ = draws(jnp.arange(1000, 1000 + MORE_SEEDS, dtype=jnp.uint32))
    for leaf in suspects:
        exact = expected[leaf]
        errors = _as_float(more[leaf]) - exact
        sigmas = _most_sigmas(errors, exact, least * sizes[leaf] + 3 * rounding[leaf])
        if sigmas > SIGMAS:
            mean = errors.mean(0)
            told = f"{leaf}: {sigmas:.3g} sigmas, error of the mean {_norm(mean) / sizes[leaf]:.3g}"
            failures.append(
                Failure("bias" + kind, name, f"{told}, {_along(mean + exact, exact):+.3g}")
            )
    return failures


def _errors_of_noisy_arguments(
    run: Callable[..., Any],
    seed: int,
    values: dict[str, np.ndarray],
    expected: dict[str, np.ndarray],
    noise: float = NOISE,
) -> dict[str, float]:
    """How far the gradient moves if arguments have noise, a part of their standard deviation."""
    rng = np.random.default_rng(seed)
    moved = []
    for _ in range(4):
        noisy = {
            n: (v + noise * v.std(dtype=np.float32) * rng.normal(size=v.shape)).astype(v.dtype)
            if jnp.issubdtype(v.dtype, jnp.inexact) else v
            for n, v in values.items()
        }  # fmt: skip
        moved.append(_as_float(run(noisy)[0]))
    return {n: max(_norm(one[n] - exact) for one in moved) for n, exact in expected.items()}


def _most_sigmas(errors: np.ndarray, exact: np.ndarray, least: float) -> float:
    """How far the mean of errors is from zero, along the gradient and some other directions."""
    count = len(errors)
    errors = errors.reshape(count, -1)
    rng = np.random.default_rng(0)
    signs = rng.choice([-1.0, 1.0], size=(4, errors.shape[1]))
    directions = np.stack([exact.ravel(), np.sign(exact.ravel()), *signs])
    directions /= np.linalg.norm(directions, axis=1, keepdims=True) + 1e-300
    projected = errors @ directions.T
    excess = np.abs(projected.mean(0)) - least
    deviation = projected.std(0, ddof=1) / count**0.5
    return float(np.max(excess / (deviation + 1e-300)))


def checks_of(seed: int) -> list[tuple[str, str, int]]:
    """The checks of a program of `make test`: one of exact gradients or one of coded ones."""
    calls = 1 + seed // 2 % 2
    if seed % 2:
        return [("coded", [*CODED][seed // 4 % len(CODED)], calls)]
    return [("exact", [*EXACT][seed // 4 % len(EXACT)], calls)]


def check(program: Program, kind: str, name: str, calls: int) -> list[Failure]:
    """One check by name."""
    by_kind = {"exact": check_exact, "coded": check_coded, "steps": check_steps}
    return by_kind[kind](program, name, calls)
