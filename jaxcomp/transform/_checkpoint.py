"""`checkpoint`: any function that saves what its backward pass needs as a policy says."""

import contextvars
import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import InconclusiveDimensionOperation, Jaxpr
from jaxtyping import Array, PyTree

from jaxcomp._core import remat3
from jaxcomp._core.custom_derivative import Differentiable
from jaxcomp._core.explicit import explicit_axes
from jaxcomp._core.integers import as_seed
from jaxcomp._core.linear_map import ByPosition
from jaxcomp.codecs import noise
from jaxcomp.codecs._codec import Seed
from jaxcomp.memory._tracing import CHECKPOINT_PRIMITIVES, open_jaxpr
from jaxcomp.policies._policy import JaxPolicy, Policy
from jaxcomp.policies._specs import PolicyLike, describe, policy_for_function
from jaxcomp.transform._choice.context import Context
from jaxcomp.transform._choice.schedule import plain_bytes
from jaxcomp.transform._nested.nested import scheduled
from jaxcomp.transform._nested.scheduled import ScheduledProgram
from jaxcomp.transform._pieces.limits import Limits, current_limits
from jaxcomp.transform._plan import Plan, warn_of_closed_regions
from jaxcomp.transform._program.automatic_axes import automatic, run_over_automatic_axes
from jaxcomp.transform._program.keyed import Keyed
from jaxcomp.transform._program.program import Program, as_array, avals, is_reference
from jaxcomp.transform._program.without_codes import has_codes, without_codes

_REMEMBERED = 64  # programs
_depth = contextvars.ContextVar("depth", default=0)  # of the calls that are looked into


class Checkpointed:
    """What `checkpoint` returns: a function that saves values as a policy says."""

    def __init__(
        self,
        fn: Callable[..., Any],
        policy: Policy | JaxPolicy,
        coded_argnums: tuple[int, ...],
        static_argnums: tuple[int, ...],
        static_argnames: dict[str, int | None],
        seed: Seed,
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._policy = policy
        self._coded = coded_argnums
        self._static = static_argnums
        self._static_names = static_argnames
        self._seed = seed

    @property
    def policy(self) -> Policy | JaxPolicy:
        """The policy by which it saves values."""
        return self._policy

    def __repr__(self) -> str:
        """Returns the function and the policy."""
        name = getattr(self._fn, "__qualname__", repr(self._fn))
        return f"<jaxcomp.checkpoint of {name}, by {describe(self._policy)}>"

    def __get__(self, owner: Any, kind: type | None = None) -> Callable[..., Any]:
        """Binds the first argument, as for a method."""
        return self if owner is None else functools.partial(self, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        program, constants, leaves, coded, tree = self._trace(args, kwargs)

        def run(program: Program, *arguments: Array) -> list[Array]:
            return self._run(program, coded, arguments)

        operands = [*map(_array, constants), *map(_array, leaves)]
        if explicit_axes():
            results = run_over_automatic_axes(program, run, operands)
        else:
            results = run(program, *operands)
        return jax.tree.unflatten(tree, results)

    def _run(self, program: Program, coded: list[int], arguments: Sequence[Array]) -> list[Array]:
        """Returns the results of the traced function."""
        return _Traced(program, coded, self._policy)(self._seed, *arguments)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Returns what a call would save; nothing is computed. `jaxcomp.plan` calls it.

        Args:
            *args: The function's arguments, or `jax.ShapeDtypeStruct`s. Every floating-point one
                counts as differentiated, arrays that the function closes over do not.
            **kwargs: Its keyword arguments, likewise.

        Raises:
            ValueError: If no argument is a floating-point array, or as `checkpoint` does.
        """
        program, constants, _, coded, _ = self._trace(args, kwargs)
        fixed = {i for i, c in enumerate(constants) if not isinstance(c, jax.core.Tracer)}
        active = [
            i
            for i, argument in enumerate(program.arguments)
            if jnp.issubdtype(argument.aval.dtype, jnp.inexact)
            and i not in fixed
            and not is_reference(argument)
        ]
        if not active:
            raise ValueError("no argument is a floating-point array: there is no gradient")
        with automatic(program) as program:
            chosen, context = _scheduled(program, active, coded, self._policy, current_limits())
            exact = without_codes(program) if has_codes(program) else program
            plan = Plan.of_program(chosen, plain_bytes(exact, active, coded))
        small = tuple(f"every value is too small for {rule}" for rule in context.too_large())
        return dataclasses.replace(plan, notes=(*plan.notes, *small))

    def _trace(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[Program, list[Any], list[Any], list[int], Any]:
        """Returns the program, what the function closes over, its arguments and the coded ones."""
        count = len(args)
        coded, static = (
            _positions(name, numbers, count)
            for name, numbers in (("coded_argnums", self._coded), ("static_argnums", self._static))
        )
        by_name = (i for i in self._static_names.values() if i is not None)
        static |= {i for i in by_name if i < count}
        fixed = {name: kwargs[name] for name in self._static_names if name in kwargs}
        moving = {name: value for name, value in kwargs.items() if name not in fixed}

        changed: dict[int, tuple[Any, ...]] = {}  # the paths of arguments that the function sets

        @functools.wraps(self._fn)
        def run(*args: Any, **kwargs: Any) -> Any:  # JAX keeps traces by the function: a new one
            before = jax.tree.leaves_with_path((args, kwargs))
            result = self._fn(*args, **kwargs)
            found = _changed(before, jax.tree.leaves_with_path((args, kwargs)))
            changed.update({i: path for i, (path, _) in found.items()})
            return result, [leaf for _, leaf in found.values()]

        trace = jax.make_jaxpr(
            functools.partial(run, **fixed), static_argnums=sorted(static), return_shape=True
        )
        with remat3.traced_without():
            try:
                traced, (shape, _) = trace(*args, **moving)
            except jax.errors.UnexpectedTracerError as error:
                if changed:
                    raise _changes([*changed.values()]) from error
                raise
            except TypeError:
                moved = tuple(arg for i, arg in enumerate(args) if i not in static)
                _check_arrays(moved, moving)
                raise
        jaxpr = traced.jaxpr
        results = jaxpr.outvars[: len(jaxpr.outvars) - len(changed)]
        pairs = zip(changed.items(), jaxpr.outvars[len(results) :], strict=True)
        other = [path for (i, path), v in pairs if _passed_on(jaxpr, v) is not jaxpr.invars[i]]
        if other:
            raise _changes(other)
        opened = jaxpr.replace(
            constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], outvars=results
        )
        positions = [i for i, arg in enumerate(args) if i not in static for _ in _leaves(arg)]
        chosen = [len(traced.consts) + i for i, number in enumerate(positions) if number in coded]
        leaves = _leaves(([arg for i, arg in enumerate(args) if i not in static], moving))
        return Program(opened), traced.consts, leaves, chosen, jax.tree.structure(shape)


def _check_arrays(args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> None:
    """Raises a TypeError if an argument has a leaf that is no array."""
    for path, leaf in jax.tree.leaves_with_path((args, kwargs)):
        try:
            jax.typeof(leaf)
        except TypeError as error:
            name = jax.tree_util.keystr(path[1:])
            raise TypeError(
                f"argument {name} is of type {type(leaf).__name__}: expected an array. Close over "
                "it, name it in static_argnums or static_argnames, or, of an Equinox module, pass "
                "the arrays alone (equinox.partition)"
            ) from error


def _changed(
    before: list[tuple[tuple[Any, ...], object]], after: list[tuple[tuple[Any, ...], object]]
) -> dict[int, tuple[tuple[Any, ...], object]]:
    """Returns the arrays that a call has set in its arguments, such as a Flax NNX module.

    By the position among all arrays of the arguments, with their paths.

    Raises:
        ValueError: If the call has set anything else.
    """
    leaf_at = dict(after)
    changed = [path for path, leaf in before if leaf_at.get(path) is not leaf]
    others = [path for path in changed if not isinstance(leaf_at.get(path), jax.core.Tracer)]
    if others or len(after) != len(before):
        known = {path for path, _ in before}
        raise _changes([*others, *(path for path in leaf_at if path not in known)])
    arrays = [path for path, leaf in before if isinstance(leaf, jax.core.Tracer)]
    return {arrays.index(path): (path, leaf_at[path]) for path in changed}


def _changes(paths: Sequence[tuple[Any, ...]]) -> ValueError:
    names = ", ".join(jax.tree_util.keystr(path[1:]) for path in paths[:3])
    return ValueError(
        f"the function changes its argument ({names or 'a part is gone'}), which has no effect "
        "outside of the call: return the new state, or make the module a part of a model for "
        "jaxcomp.compress"
    )


def _passed_on(jaxpr: Jaxpr, atom: Any) -> Any:
    """Returns the argument that a result is, if regions, loops and calls only pass it on.

    Flax sets the parameters of a module in `nnx.remat` or `nnx.scan` to such results.
    """
    for equation in reversed(jaxpr.eqns):
        name, params = equation.primitive.name, equation.params
        if atom not in equation.outvars or name not in (*CHECKPOINT_PRIMITIVES, "jit", "scan"):
            continue
        inner = open_jaxpr(params["jaxpr"])
        index = equation.outvars.index(atom)
        passed = _passed_on(inner, inner.outvars[index])
        if passed not in inner.invars:
            return atom
        position = inner.invars.index(passed)
        if name == "scan":
            at_x = params["num_consts"] + params["num_carry"]
            is_same = position == params["num_consts"] + index
            if not (position >= at_x if index >= params["num_carry"] else is_same):
                return atom
        atom = equation.invars[position]
    return atom


def _array(value: Array) -> Any:
    """Returns a Python scalar as an array of its weak type, and so is its tangent."""
    kind = jax.typeof(value)
    return jnp.copy(value) if kind.weak_type and not kind.shape else value


def _leaves(tree: PyTree) -> list[Array]:
    return jax.tree.leaves(tree)


def _positions(name: str, numbers: tuple[int, ...], count: int) -> set[int]:
    if not all(-count <= number < count for number in numbers):
        raise ValueError(f"{name}={numbers}: the call has {count} positional arguments")
    return {number % count for number in numbers}


@remat3.traced_without()
def _scheduled(
    program: Program,
    active: Sequence[int],
    coded: Sequence[int],
    policy: Policy | JaxPolicy,
    limits: Limits,
) -> tuple[ScheduledProgram, Context]:
    context = Context(policy, limits)
    token = _depth.set(_depth.get() + 1)
    try:
        chosen = scheduled(program, active, coded, context)
    except InconclusiveDimensionOperation as error:
        shapes = [kind.shape for kind in avals(program.arguments)]
        symbolic = [s for s in shapes if not all(isinstance(size, int) for size in s)]
        raise NotImplementedError(
            f"arguments of symbolic shapes {symbolic}: expected integers, since sizes decide what "
            "is saved for a gradient; export the gradient once for each shape"
        ) from error
    finally:
        _depth.reset(token)
    context.check()
    return chosen, context


def _scheduled_once(
    program: Program, active: list[int], coded: list[int], policy: Policy | JaxPolicy
) -> ScheduledProgram:
    """Does what `_scheduled` does, once for equal programs.

    Calls outside of `jax.jit`, and repeated layers.
    """
    limits = current_limits()
    keyed = Keyed.of(program, tuple(active), tuple(coded), policy, limits)
    if keyed is None:
        chosen, _ = _scheduled(program, active, coded, policy, limits)
    else:
        chosen = _scheduled_of_key(keyed)
    warn_of_closed_regions(chosen)
    return chosen


@functools.lru_cache(_REMEMBERED)
def _scheduled_of_key(keyed: Keyed) -> ScheduledProgram:
    return _scheduled(keyed.program, *keyed.rest)[0]


@dataclasses.dataclass(frozen=True, eq=False)
class _Traced(Differentiable[ScheduledProgram]):
    """A traced function that saves values as a policy says.

    Attributes:
        program: The function.
        coded: The arguments that the policy decides about.
        policy: The policy.
    """

    program: Program
    coded: list[int]
    policy: Policy | JaxPolicy

    def evaluate(self, seed: Seed, arguments: list[Array]) -> list[Array]:
        return [*map(as_array, self.program(*arguments))]

    def choose(
        self, seed: Seed, arguments: list[Array], differentiated: list[int]
    ) -> ScheduledProgram | None:
        # An integer that came out of another such call counts as differentiated, too.
        inexact = [i for i in differentiated if jnp.issubdtype(arguments[i].dtype, jnp.inexact)]
        return _scheduled_once(self.program, inexact, self.coded, self.policy) if inexact else None

    def forward(
        self, choice: ScheduledProgram, seed: Seed, arguments: list[Array]
    ) -> tuple[list[Array], PyTree]:
        of_call = _seed_of_call(seed, [arguments[i] for i in choice.schedule.active])
        return choice.forward(of_call, arguments)

    def linear(
        self, choice: ScheduledProgram, residual: PyTree, tangents: ByPosition
    ) -> ByPosition:
        return choice.linear(residual, tangents)

    def backward(
        self, choice: ScheduledProgram, residual: PyTree, cotangents: ByPosition
    ) -> ByPosition:
        return choice.backward(residual, cotangents)


def _seed_of_call(seed: Seed, arguments: list[Array]) -> Any:
    """Mixes a seed with what differs between calls, and iterations, on one path of a gradient.

    That is a sample of the arguments, or the depth of a call inside of another one. It is behind a
    barrier, or XLA computes it again in each kernel that reads it.
    """
    sample = noise.spot_check(*map(jnp.asarray, arguments))
    return jax.lax.optimization_barrier(noise.folded(seed, sample + jnp.uint32(_depth.get())))


def checkpoint(
    fn: Callable[..., Any],
    policy: PolicyLike = "automatic",
    *,
    coded_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    seed: Seed = None,
) -> Checkpointed:
    """Compresses the values that a function saves for its backward pass.

    It is used like `jax.checkpoint` and takes the same policies. It has no `prevent_cse`: XLA never
    merges what is recomputed with the forward pass. A `Policy` may also encode a value where those
    keep or recompute it. The function's results are bit-identical. Its derivative is
    taken in the forward pass, at the exact values. It saves a smallest set of values from which all
    coefficients of the backward pass can be computed:

    - Only affine steps are recomputed from a decoded value, casts to bfloat16 and float16 among
      them. For a nonlinear step its derivative is saved instead. Casts to fewer digits, such as
      `float8`, are nonlinear; the plan states the bias of cotangents that they round. Masks,
      indices and statistics are exact.
    - Arguments are held by the caller and take no memory, except `coded_argnums`.
    - A value that appears twice in a product of the backward pass gets two codes of independent
      noise. If a mean over at least 64 elements lies between the two (as in a norm) it gets one
      code, and the plan states the bias. So has a recognized batch norm; its plan states a bias of
      more than 0.1%.
    - Each iteration of a `scan` without side effects saves what the policy says of its values. The
      carry from the iteration before has the role "input" and is always saved.
    - Each branch of a `cond` or `switch` without side effects saves what the policy says of its
      values. Values of equal types in several branches share their memory.
    - Batch norms with the skip connection, `jax.nn.relu` and max pool that follow, max pools alone
      and attentions are recognized, whoever wrote them: they save what the operations of
      `jaxcomp.ops` save. The scores of an attention are recomputed, on one device in parts.
    - `jax.nn.gelu` and `silu` between products, and gated linear units, have one code of each
      operand, where a policy quantizes with 3 bits or more. It is unbiased as long as the levels of
      an argument are near to each other: at most 1 apart, which 4 bits reach from -4 to 68.

    - A region under `jax.checkpoint` is opened, or kept as it is, whichever takes fewer bytes; a
      rule with `op="checkpoint"` decides itself. Policies without codecs keep all regions. A kept
      region with a large attention is evaluated again in slices; where its scores take 1 GiB or
      more, so is its forward pass, and the results may differ by rounding.

    So the gradient is unbiased if the codecs are. Values that a user's `jax.custom_vjp`, a region
    that is kept, a `while` loop, or a loop or branch with side effects reads are exact.

    Where nothing is encoded, there is forward mode (`jax.jvp`), and there are higher derivatives in
    any order of the modes. Where something is, forward mode is an error; the attribute
    `__wrapped__` is `fn`, which has it. A `while` loop that changes differentiated values has
    forward mode alone, as in JAX.

    Args:
        fn: A function of any pytrees. Arrays that it closes over are differentiated, too.
        policy: A `Policy`; a `Codec`, for values of any size (the spec of the same codec leaves out
            values of fewer than 16,384 elements); a spec, as `policies.from_spec` reads it; or one
            of `jax.checkpoint_policies`. By default, `recipes.automatic()`.
        coded_argnums: Positional arguments that nothing else keeps, such as the result of the
            layer before. The policy decides about them by the role "input".
        static_argnums: Positional arguments that are no arrays. They are hashable.
        static_argnames: Names of such arguments, passed by name or by position.
        seed: Integer scalar, or a key of `jax.random.key`, that redraws the rounding noise. The
            noise is a hash of the values (of a few of them, for a norm with a ReLU), of the seed,
            and of up to 1,024 elements of each argument that is differentiated. So calls with other
            arguments, and iterations, have other noise. Calls of equal arguments, such as a state
            that has converged, have equal noise: give each a seed.

    Returns:
        The transformed function. `jaxcomp.plan(it, *args)` shows what it saves.

    Raises:
        TypeError: If `fn` is no function, or `policy` or `seed` is not one of these; once a
            gradient is taken, if a rule gives integers to a codec.
        ValueError: If a spec is unknown or there is no argument of a name; in a call, if the
            function changes an argument, as a Flax NNX module updates its state; once a gradient is
            taken, if a required rule of the policy matches nothing.
        NotImplementedError: If a second derivative passes through a code; once a gradient is taken,
            if a shape is symbolic, or the function makes or differentiates a reference of
            `jax.new_ref`.

    Example:
        >>> from jaxcomp import Quantize
        >>> def mlp(x, w1, w2):
        ...     return jax.nn.gelu(x @ w1) @ w2
        >>> f = checkpoint(mlp, Quantize(bits=4))
        >>> args = jnp.ones((256, 64)), jnp.ones((64, 256)), jnp.ones((256, 64))
        >>> [value.op for value in f.plan(*args).values]
        ['activation']
        >>> jax.grad(lambda *args: f(*args).sum())(*args).shape
        (256, 64)
    """
    if not callable(fn):
        raise TypeError(f"fn={fn!r}: expected a function")
    if seed is not None:
        seed = as_seed(seed)
        kind = jnp.asarray(() if isinstance(seed, str | bytes) else seed)  # of another shape
        is_key = jnp.issubdtype(kind.dtype, jax.dtypes.prng_key)
        if kind.shape or not (is_key or jnp.issubdtype(kind.dtype, jnp.integer)):
            raise TypeError(f"seed={seed!r}: expected an integer scalar or a key of jax.random.key")
        seed = jax.random.bits(kind) if is_key else seed
    coded, static = (
        _numbers("coded_argnums", coded_argnums),
        _numbers("static_argnums", static_argnums),
    )
    names = _named(fn, static_argnames)
    return Checkpointed(fn, policy_for_function(policy), coded, static, names, seed)


def _named(fn: Callable[..., Any], argument: str | Sequence[str]) -> dict[str, int | None]:
    """Returns the static arguments' names, each with its position; None where it is not known."""
    names = (argument,) if isinstance(argument, str) else tuple(argument)
    if not names:
        return {}
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return dict.fromkeys(names)
    kinds = [parameter.kind for parameter in parameters.values()]
    if inspect.Parameter.VAR_KEYWORD not in kinds and not set(names) <= parameters.keys():
        raise ValueError(f"static_argnames={argument!r}: expected names among {[*parameters]}")
    by_position = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    positional = [name for name, parameter in parameters.items() if parameter.kind in by_position]
    return {name: positional.index(name) if name in positional else None for name in names}


def _numbers(name: str, argument: int | Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(
            map(operator.index, argument if isinstance(argument, Sequence) else (argument,))
        )
    except TypeError as error:
        raise TypeError(
            f"{name}={argument!r}: expected an integer or a sequence of them"
        ) from error
