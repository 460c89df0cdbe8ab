"""Random programs: operations in wrappers, as data that follows from a seed."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxcomp as jc
from tests.fuzz.operations import OPERATIONS, Own, Unfit, Weights, fitting

Array = Any
Function = Callable[[dict[str, Array], Array], Array]

SHAPES = {"features": (8, 16), "tokens": (4, 6, 16), "image": (4, 6, 6, 8)}
DTYPES = ("float32", "bfloat16", "float16")
LARGEST, SMALLEST = 2048, 16  # elements of an array between two operations
X = "x"  # name of the argument that flows through the operations
OUTER = (
    *("none", "none", "none", "jit", "jit", "remat", "nested", "vmap", "scan", "map", "cond"),
    *("custom_vjp", "shard_map"),
)


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation: its name, and the seed of its choices and weights."""

    name: str
    seed: int


@dataclasses.dataclass(frozen=True)
class Block:
    """Operations in a wrapper."""

    wrapper: str
    items: tuple["Op | Block", ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of weights and of one array, and how it is called.

    Attributes:
        seed: Of the array.
        dtype: Of the array and of what is computed.
        mixed: Whether weights are float32.
        start: Kind of the array, a key of `SHAPES`.
        items: What is computed.
        outer: What is around the call of `jaxcomp.checkpoint`.
        first: Names of the arguments that are differentiated.
        second: Those in a second call in the same loss.
    """

    seed: int
    dtype: str
    mixed: bool
    start: str
    items: tuple[Op | Block, ...]
    outer: str = "none"
    first: tuple[str, ...] = (X,)
    second: tuple[str, ...] = (X,)

    def __str__(self) -> str:
        dtype = f"{self.dtype}, float32 weights" if self.mixed else self.dtype
        sets = f"of {'+'.join(self.first)}, then {'+'.join(self.second)}"
        items = ", ".join(map(_text, self.items))
        return f"#{self.seed} {self.outer}({items}) on {self.start} in {dtype}; {sets}"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Program":
        fields = json.loads(text)
        fields |= {name: tuple(fields[name]) for name in ("first", "second")}
        return cls(**fields | {"items": tuple(map(_read, fields["items"]))})

    def input(self, number: int = 0) -> np.ndarray:
        """The array of a call."""
        rng = np.random.default_rng((self.seed, number))
        return rng.normal(size=SHAPES[self.start]).astype(jnp.dtype(self.dtype))

    def arguments(self) -> dict[str, np.ndarray]:
        """All arguments by name.

        Raises:
            Unfit: An operation does not fit.
        """
        weights = Weights({}, self.dtype, self.mixed, is_complete=False)
        shape = _outer_shape(self)
        jax.eval_shape(
            lambda x: compute(self.items, weights, x), jax.ShapeDtypeStruct(shape, self.dtype)
        )
        return weights.values | {X: self.input()}

    def function(self, dtype: Any = None, policy: Any = None, seed: Any = None) -> Function:
        """The function of the weights and the array, without what is around the call.

        Args:
            dtype: Float64 for the reference.
            policy: Of inner calls of `jaxcomp.checkpoint`, which are left out without one.
            seed: Of their noise.
        """

        def run(values: dict[str, Array], x: Array) -> Array:
            weights = Weights(values, dtype or self.dtype, self.mixed, policy=policy, seed=seed)
            return compute(self.items, weights, x)

        return run


def _text(item: Op | Block) -> str:
    if isinstance(item, Op):
        return f"{item.name}:{item.seed}"
    return f"{item.wrapper}({', '.join(map(_text, item.items))})"


def _read(fields: dict[str, Any]) -> Op | Block:
    if "name" in fields:
        return Op(**fields)
    return Block(fields["wrapper"], tuple(map(_read, fields["items"])))


def compute(items: Sequence[Op | Block], weights: Weights, x: Array) -> Array:
    """The operations one after the other."""
    for item in items:
        if isinstance(item, Block):
            x = WRAPPERS[item.wrapper](item, weights, x)
            continue
        function, ranks = OPERATIONS[item.name]
        if x.ndim not in ranks:
            raise Unfit(f"{item.name} of shape {x.shape}")
        x = function(Own(weights, item.seed), x)
    return x


def _call(block: Block, weights: Weights) -> Function:
    """The block as a function of its weights and its array."""
    return lambda values, x: compute(block.items, weights.of(values), x)


def _seeds(items: Sequence[Op | Block]) -> Iterator[int]:
    for item in items:
        if isinstance(item, Op):
            yield item.seed
        else:
            yield from _seeds(item.items)


def _own_values(block: Block, weights: Weights) -> dict[str, Array]:
    """The weights of a block's operations."""
    seeds = set(_seeds(block.items))
    return {n: v for n, v in weights.values.items() if n != X and int(n.split(".")[0]) in seeds}


def _keeps_shape(x: Array, y: Any) -> None:
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        raise Unfit(f"from {x.shape} to {y.shape}")


# Wrappers of a part. Each takes the block, the weights and the array. A program that is only looked
# at, for its weights, computes the block as it is: transformations would hide new weights.


def _transformed(
    transform: Callable[[Function, Weights], Function],
) -> Callable[[Block, Weights, Array], Array]:
    def wrapped(block: Block, weights: Weights, x: Array) -> Array:
        if not weights.is_complete:
            y = compute(block.items, weights, x)
            call = transform(_call(block, _complete(weights)), weights)
            _keeps_shape(y, jax.eval_shape(call, _own_values(block, weights), x))
            return y
        return transform(_call(block, weights), weights)(_own_values(block, weights), x)

    return wrapped


def _complete(weights: Weights) -> Weights:
    new = weights.of({})
    new.is_complete = True
    return new


def _coded(call: Function, weights: Weights) -> Function:
    if weights.policy is None:
        return call
    return jc.checkpoint(call, weights.policy, seed=weights.seed)


def _in_two(x: Array) -> Array:
    if x.shape[0] % 2:
        raise Unfit
    return x.reshape(2, x.shape[0] // 2, *x.shape[1:])


def _joined(y: Array) -> Array:
    if y.ndim < 3:
        raise Unfit
    return y.reshape(-1, *y.shape[2:])


def _vmap(call: Function, weights: Any = None) -> Function:
    return lambda values, x: _joined(jax.vmap(call, (None, 0))(values, _in_two(x)))


def _map(call: Function, weights: Any = None) -> Function:
    return lambda values, x: _joined(lax.map(functools.partial(call, values), _in_two(x)))


def _scan(call: Function, weights: Any = None) -> Function:
    def run(values: dict[str, Array], x: Array) -> Array:
        def step(count: Array, x: Array) -> tuple[Array, Array]:
            return count + 1, call(values, x)

        return _joined(lax.scan(step, jnp.int32(0), _in_two(x))[1])

    return run


def _cond(call: Function, weights: Any = None) -> Function:
    def run(values: dict[str, Array], x: Array) -> Array:
        y = jax.eval_shape(call, values, x)

        def other(values: dict[str, Array], x: Array) -> Array:
            return jnp.full(y.shape, jnp.sin(x).sum(), y.dtype)

        return lax.cond(x.ravel()[0] == x.ravel()[0], call, other, values, x)

    return run


def _switch(call: Function, weights: Any = None) -> Function:
    def run(values: dict[str, Array], x: Array) -> Array:
        scaled = [lambda v, x, s=s: (s * call(v, x)).astype(x.dtype) for s in (1.0, 0.5, 2.0)]
        return lax.switch((x.ravel()[0] > 0) * 1 + 1, scaled, values, x)

    return run


def _custom_vjp(call: Function, weights: Any = None) -> Function:
    function = jax.custom_vjp(call)
    function.defvjp(lambda *args: jax.vjp(call, *args), lambda pull, g: pull(g))
    return function


def _shard_map(call: Function, weights: Any = None) -> Function:
    def run(values: dict[str, Array], x: Array) -> Array:
        if x.shape[0] % 2:
            raise Unfit
        mesh = jax.make_mesh(
            (2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
        )
        specs = (jax.P(), jax.P("d"))
        return jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=jax.P("d"))(values, x)

    return run


def _fori(call: Function, weights: Any = None) -> Function:
    """The same weights in each iteration."""

    def run(values: dict[str, Array], x: Array) -> Array:
        _keeps_shape(x, jax.eval_shape(call, values, x))
        return lax.fori_loop(0, 2, lambda _, h: call(values, h), x)

    return run


def _twice(call: Function, weights: Any = None) -> Function:
    return lambda values, x: call(values, call(values, x))


def _jit_twice(call: Function, weights: Any = None) -> Function:
    return _twice(jax.jit(call))


def _skip(call: Function, weights: Any = None) -> Function:
    def run(values: dict[str, Array], x: Array) -> Array:
        y = call(values, x)
        _keeps_shape(x, y)
        return x + y

    return run


def _layers(block: Block, weights: Weights, x: Array) -> Array:
    """A scan over two layers with weights of their own."""
    if not weights.is_complete:
        inner = weights.of({})
        inner.values, inner.stack = weights.values, (2, *weights.stack)
        y = compute(block.items, inner, x)
        _keeps_shape(x, y)
        return y
    call = _call(block, weights)
    own = _own_values(block, weights)
    return lax.scan(lambda h, layer: (call(layer, h), None), x, own, length=2)[0]


WRAPPERS: dict[str, Callable[[Block, Weights, Array], Array]] = {
    "jit": _transformed(lambda call, weights: jax.jit(call)),
    "remat": _transformed(lambda call, weights: jax.checkpoint(call)),
    "remat_dots": _transformed(
        lambda call, weights: jax.checkpoint(call, policy=jax.checkpoint_policies.dots_saveable)
    ),
    "coded": _transformed(_coded),
    "vmap": _transformed(_vmap),
    "map": _transformed(_map),
    "scan": _transformed(_scan),
    "cond": _transformed(_cond),
    "switch": _transformed(_switch),
    "custom_vjp": _transformed(_custom_vjp),
    "shard_map": _transformed(_shard_map),
    "fori": _transformed(_fori),
    "twice": _transformed(_twice),
    "jit_twice": _transformed(_jit_twice),
    "skip": _transformed(_skip),
    "layers": _layers,
}

_AROUND: dict[str, Callable[[Function], Function]] = {
    "none": lambda call: call,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "vmap": _vmap,
    "scan": _scan,
    "map": _map,
    "cond": _cond,
    "custom_vjp": _custom_vjp,
    "shard_map": _shard_map,
}
_HALVED = ("vmap", "scan", "map", "shard_map")  # the call sees half of the examples


def around(program: Program, call: Function, policy: Any = None, seed: Any = None) -> Function:
    """What the program has around its call of `jaxcomp.checkpoint`."""
    if program.outer == "nested":
        return call if policy is None else jc.checkpoint(call, policy, seed=seed)
    return _AROUND[program.outer](call)


def _outer_shape(program: Program) -> tuple[int, ...]:
    first, *rest = SHAPES[program.start]
    return (first // 2 if program.outer in _HALVED else first, *rest)


def seen(program: Program, x: np.ndarray) -> np.ndarray:
    """The part of the array that one call of `jaxcomp.checkpoint` sees."""
    return x[: _outer_shape(program)[0]]


# Generation.


def generate(seed: int, most: int = 8) -> Program:
    """The program of a seed, of 3 to `most` operations."""
    rng = np.random.default_rng(seed)
    dtype = str(rng.choice(DTYPES, p=(0.6, 0.25, 0.15)))
    mixed = dtype != "float32" and bool(rng.integers(2))
    outer = str(rng.choice(OUTER))
    program = Program(seed, dtype, mixed, str(rng.choice([*SHAPES])), (), outer)
    target = int(rng.integers(3, most + 1))
    items: tuple[Op | Block, ...] = ()
    for _ in range(20):
        if len(list(_seeds(items))) >= target:
            break
        added = _random_item(rng, program, items)
        longer = dataclasses.replace(program, items=(*items, added))
        if _fits(longer):
            items = longer.items
    program = dataclasses.replace(program, items=items)
    names = _differentiable(program)
    return dataclasses.replace(program, first=_subset(rng, names), second=_subset(rng, names))


def _random_item(
    rng: np.random.Generator, program: Program, before: Sequence[Op | Block]
) -> Op | Block:
    rank = _shape_after(program, before).ndim

    def op() -> Op:
        return Op(str(rng.choice(fitting(rank))), int(rng.integers(10**6)))

    if rng.random() < 0.65:
        return op()
    items: tuple[Op | Block, ...] = tuple(op() for _ in range(rng.integers(1, 4)))
    if rng.random() < 0.2:
        items = (Block(str(rng.choice([*WRAPPERS])), items),)
    return Block(str(rng.choice([*WRAPPERS])), items)


def _shape_after(program: Program, items: Sequence[Op | Block]) -> Any:
    weights = Weights({}, program.dtype, program.mixed, is_complete=False)
    x = jax.ShapeDtypeStruct(_outer_shape(program), program.dtype)
    return jax.eval_shape(lambda x: compute(items, weights, x), x)


def _fits(program: Program) -> bool:
    try:
        y = _shape_after(program, program.items)
        values = program.arguments()
        jax.eval_shape(around(program, program.function()), values, values[X])
    except (Unfit, TypeError, ValueError, IndexError, ZeroDivisionError):
        return False
    sizes_fit = SMALLEST <= y.size <= LARGEST and y.ndim in (2, 3, 4) and y.shape[0] > 1
    return bool(sizes_fit and y.dtype == jnp.dtype(program.dtype))


def _differentiable(program: Program) -> list[str]:
    values = program.arguments()
    return [name for name, value in values.items() if jnp.issubdtype(value.dtype, jnp.inexact)]


def _subset(rng: np.random.Generator, names: Sequence[str]) -> tuple[str, ...]:
    if rng.random() < 0.3:
        return tuple(names)
    chosen = [name for name in names if rng.integers(2)]
    return tuple(chosen or [str(rng.choice(names))])


# Smaller programs.


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest steps first."""
    for items in _fewer(program.items):
        if items:
            yield dataclasses.replace(program, items=items)
    if program.outer != "none":
        yield dataclasses.replace(program, outer="none")
    if program.mixed:
        yield dataclasses.replace(program, mixed=False)
    if program.dtype != "float32":
        yield dataclasses.replace(program, dtype="float32", mixed=False)
    for rest in _less_one(program.first):
        yield dataclasses.replace(program, first=rest)
    for rest in _less_one(program.second):
        yield dataclasses.replace(program, second=rest)


def _less_one(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    found = [tuple(n for n in names if n != name) for name in names]
    return [rest for rest in found if rest]


def _fewer(items: tuple[Op | Block, ...]) -> Iterator[tuple[Op | Block, ...]]:
    for i, item in enumerate(items):
        before, after = items[:i], items[i + 1 :]
        yield (*before, *after)
        if isinstance(item, Block):
            yield (*before, *item.items, *after)
    for i, item in enumerate(items):
        if isinstance(item, Block):
            for inner in _fewer(item.items):
                if inner:
                    yield (*items[:i], Block(item.wrapper, inner), *items[i + 1 :])


def minimised(program: Program, fails: Callable[[Program], bool], trials: int = 100) -> Program:
    """A smallest program that still fails, as far as so many trials find one."""
    is_found = True
    while is_found:
        is_found = False
        for candidate in smaller(program):
            if trials == 0:
                return program
            if not _fits(candidate):
                continue
            names = set(_differentiable(candidate))
            first, second = (
                tuple(n for n in chosen if n in names)
                for chosen in (candidate.first, candidate.second)
            )
            if not (first and second):
                continue
            candidate = dataclasses.replace(candidate, first=first, second=second)
            trials -= 1
            if fails(candidate):
                program, is_found = candidate, True
                break
    return program
