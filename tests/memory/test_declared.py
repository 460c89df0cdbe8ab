import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies
from jax.sharding import PartitionSpec

from jaxcomp import memory
from jaxcomp.memory import declared_residual_bytes, declared_residuals

W = jax.ShapeDtypeStruct((4, 4), jnp.float32)
X = jax.ShapeDtypeStruct((8, 4), jnp.float32)
FLOAT = 8 * 4 * 4  # bytes of one activation


def encoded_as(dtype):
    """sin(x) that keeps only a code of that dtype."""

    @jax.custom_vjp
    def sin(x):
        return jnp.sin(x)

    def forward(x):
        return jnp.sin(x), lax.optimization_barrier(jnp.round(x * 7).astype(dtype))

    def backward(code, gradient):
        code, gradient = lax.optimization_barrier((code, gradient))
        return (code.astype(jnp.float32) * gradient,)

    sin.defvjp(forward, backward)
    return sin


def named(w, x):
    hidden = checkpoint_name(jnp.sin(checkpoint_name(jnp.sin(x @ w), "first") @ w), "second")
    return hidden.sum()


def layers(w, x):
    for _ in range(3):
        x = jnp.sin(x @ w)
    return x.sum()


def scanned(w, x):
    return lax.scan(lambda h, _: (jnp.sin(h @ w), None), x, None, length=3)[0].sum()


def micro_batches(w, x):
    def add(total, part):
        return total + jax.grad(lambda w: jnp.sin(part @ w).sum())(w), None

    return lax.scan(add, jnp.zeros((4, 4)), x.reshape(2, 4, 4))[0]


def offloaded():
    policy = checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["first"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(named, policy=policy)


EXACT = {
    "linear in w: x is an argument": (lambda w, x: (x @ w).sum(), 0),
    "cos of the product": (lambda w, x: jnp.sin(x @ w).sum(), FLOAT),
    "relu: a bool mask, no zeros": (lambda w, x: jax.nn.relu(x @ w).sum(), 8 * 4),
    # cos three times; sin twice, as operand of the next product
    "three layers": (layers, 5 * FLOAT),
    "a jitted function called twice": (
        lambda w, x: (lambda f: f(f(x @ w) @ w).sum())(jax.jit(jnp.sin)),
        3 * FLOAT,
    ),
    "exp is its own derivative": (lambda w, x: jnp.exp(x @ w).sum(), FLOAT),
    "a value behind a barrier, a name and a reshape": (
        lambda w, x: (
            lambda e: (
                (e * lax.optimization_barrier(checkpoint_name(e, "e"))).sum()
                + (e.reshape(-1) * e.reshape(-1)).sum()
            )
        )(jnp.exp(x @ w)),
        FLOAT,
    ),
    "a broadcast keeps what it broadcasts": (
        lambda w, x: (jnp.exp(w[0:1]).sum() * jnp.exp(x @ w)).sum(),
        16 + 4 + FLOAT,  # exp(w[0:1]), its sum, and the product's exp
    ),
    "parts and transposes of arguments are arguments": (
        lambda w, x: (x[:, :2] @ w.T[:2]).sum() * jnp.split(w, 2)[0][0, 0],
        4,  # the sum, a scalar
    ),
    "uint4 code": (lambda w, x: encoded_as(jnp.uint4)(x @ w).sum(), 8 * 4 // 2),
    "uint2 code": (lambda w, x: encoded_as(jnp.uint2)(x @ w).sum(), 8 * 4 // 4),
    "int8 code": (lambda w, x: encoded_as(jnp.int8)(x @ w).sum(), 8 * 4),
    "bfloat16": (lambda w, x: jnp.sin((x @ w).astype(jnp.bfloat16)).sum(), FLOAT // 2),
    "scan stacks its residuals": (scanned, 3 * 2 * FLOAT),
    "checkpoint keeps its input": (
        lambda w, x: jax.checkpoint(lambda x: layers(w, x))(jnp.exp(x)),
        FLOAT,
    ),
    "checkpoint of arguments keeps nothing": (jax.checkpoint(layers), 0),
    "checkpoint with a policy keeps the named value": (
        jax.checkpoint(named, policy=checkpoint_policies.save_only_these_names("first")),
        FLOAT,
    ),
    "offloaded values are in the host": (offloaded(), 0),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_by_hand(name):
    fn, expected = EXACT[name]
    assert declared_residual_bytes(jax.grad(fn), W, X) == expected


@pytest.mark.parametrize("name", ["relu: a bool mask, no zeros", "uint4 code", "three layers"])
def test_a_step_counts_the_same_jitted_and_with_its_update(name):
    fn, expected = EXACT[name]

    @jax.jit
    def step(w, x):
        loss, gradient = jax.value_and_grad(fn)(w, x)
        return w - 0.1 * gradient, loss

    assert declared_residual_bytes(step, W, X) == expected


def test_without_a_gradient_inside_the_pullback_is_counted():
    relu, mask = EXACT["relu: a bool mask, no zeros"]
    assert declared_residual_bytes(relu, W, X) == mask
    code, packed = EXACT["uint4 code"]
    assert declared_residual_bytes(code, W, X) == packed


def test_programs_that_derivatives_alone_run_are_no_backward_pass():
    """As the transposed solution that a linear system of `jax.numpy` has in its equation."""

    def solved(w, x):
        matrix = 4 * jnp.eye(4) + w
        return jnp.sin(jnp.linalg.solve(matrix, x.T)).sum()

    matrices = 2 * 4 * 4 * 4 + 4 * 4  # itself, its factors, and their permutation
    solution_and_cosine = 2 * FLOAT
    for fn in (solved, jax.grad(solved, (0, 1))):
        assert declared_residual_bytes(fn, W, X) == matrices + solution_and_cosine


def test_integers_have_no_residuals():
    assert declared_residual_bytes(lambda i: i * i, jax.ShapeDtypeStruct((4,), jnp.int32)) == 0


def test_a_loop_over_micro_batches_counts_one_turn():
    assert declared_residual_bytes(micro_batches, W, X) == FLOAT // 2


def test_of_branches_the_largest_counts():
    def step(w, x):
        one, three = (jax.grad(EXACT[name][0]) for name in ("cos of the product", "three layers"))
        return lax.cond(w[0, 0] > 0, one, three, w, x)

    assert declared_residual_bytes(step, W, X) == 5 * FLOAT


def test_inside_shard_map_one_device_counts():
    mesh = memory.mesh("cpu", (2,), ("data",))

    def on_one(w, x):
        return lax.pmean(jax.grad(lambda w: jnp.sin(x @ w).sum())(w), "data")

    specs = (PartitionSpec(), PartitionSpec("data"))
    step = jax.shard_map(
        on_one, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False
    )
    assert declared_residual_bytes(step, W, X) == FLOAT // 2


def test_a_modules_parameters_are_arguments():
    def make():
        return nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def step(model, x):
        return nnx.grad(lambda model: jax.nn.relu(model(x)).sum())(model)

    assert declared_residual_bytes(step, make(), X) == 8 * 4
    assert declared_residual_bytes(step, nnx.eval_shape(make), X) == 8 * 4


def test_values_that_nothing_reads_are_not_kept():
    def loss(w, x):
        return jnp.sin(x @ w).sum()

    def only_loss(w, x):
        return jax.value_and_grad(loss)(w, x)[0]

    assert declared_residual_bytes(only_loss, W, X) == 0


def test_residuals_say_what_and_where():
    def loss(w, x):
        with jax.named_scope("encoder"):
            return encoded_as(jnp.uint4)(x @ w).sum()

    (found,) = declared_residuals(jax.make_jaxpr(jax.grad(loss))(W, X))
    assert (found.shape, found.dtype, found.nbytes) == ((8, 4), "uint4", 16)
    assert "encoder" in found.scope
