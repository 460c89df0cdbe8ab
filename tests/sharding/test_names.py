"""Named values of a scanned decoder, coded, offloaded or recomputed, with sharded parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomp as jc
from jaxcomp.memory import analyze, mesh
from tests.helpers import assert_close, slow

P = PartitionSpec
LAYERS = 8
NAMES = {"mlp_in": jc.Float8(), "mlp_out": jc.Offload(jc.Float8())}


def _norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale[None, None]


def _layer(gather, x, weights):
    weights = {name: gather(weight) for name, weight in weights.items()}
    y = checkpoint_name(_norm(x, weights["scale"]), "mlp_in")
    hidden = checkpoint_name(jax.nn.silu(y @ weights["up"]), "mlp_out")
    return x + hidden @ weights["down"]


def _step(policy, gather):
    """The gradient of a stack of layers under `jax.lax.scan`."""
    layer = functools.partial(_layer, gather)
    layer = jax.checkpoint(layer) if policy is None else jc.checkpoint(layer, policy)

    def loss(weights, x):
        x, _ = jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, weights)
        return jnp.square(x.astype(jnp.float32)).mean()

    return jax.jit(jax.grad(loss))


def _shapes(width, hidden):
    return {
        "up": (LAYERS, width, hidden),
        "down": (LAYERS, hidden, width),
        "scale": (LAYERS, width),
    }


SPECS = {"up": P(None, "data"), "down": P(None, None, "data"), "scale": P()}


@pytest.mark.parametrize("kind", [slow(AxisType.Auto), AxisType.Explicit])
def test_eight_devices_with_sharded_parameters(kind):
    rng = np.random.default_rng(0)
    weights = {
        k: jnp.asarray(rng.normal(size=s) / 8, jnp.float32) for k, s in _shapes(64, 128).items()
    }
    x = jnp.asarray(rng.normal(size=(16, 32, 64)), jnp.float32)
    devices = jax.make_mesh((8,), ("data",), (kind,))

    def gather(weight):
        spec = P(*[None] * weight.ndim)
        reshard = (
            jax.sharding.reshard if kind == AxisType.Explicit else jax.lax.with_sharding_constraint
        )
        return reshard(weight, spec)

    exact = _step(None, lambda weight: weight)(weights, x)
    policy = jc.recipes.save_names({"mlp_in": jc.Float8(), "mlp_out": jc.Float8("e5m2")})
    with jax.set_mesh(devices):
        placed = {
            k: jax.device_put(w, NamedSharding(devices, SPECS[k])) for k, w in weights.items()
        }
        step = _step(policy, gather)
        found = step(placed, jax.device_put(x, NamedSharding(devices, P("data"))))
        for name, gradient in found.items() if kind == AxisType.Explicit else ():
            assert gradient.sharding.is_equivalent_to(placed[name].sharding, gradient.ndim)
    for name, gradient in found.items():
        error = np.linalg.norm(gradient - exact[name]) / np.linalg.norm(exact[name])
        assert 1e-3 < error < 0.05  # the noise of 8 bits, and no more
    kept = jc.recipes.save_names({"mlp_in": "keep", "mlp_out": "keep"})
    assert_close(_step(kept, lambda weight: weight)(weights, x), exact)


@pytest.mark.aot
def test_h100_saves_the_names_alone(capsys):
    """Eight devices, whose parameters are sharded; the batch of each is 8 x 512."""
    pytest.importorskip("jax_cuda13_plugin")
    width, hidden, batch = 512, 2048, 64
    devices = mesh("h100:8", (8,), ("data",))

    def struct(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(devices, spec))

    weights = {k: struct(shape, SPECS[k]) for k, shape in _shapes(width, hidden).items()}
    x = struct((batch, 512, width), P("data"))
    gathered = NamedSharding(devices, P())

    def gather(weight):
        return jax.lax.with_sharding_constraint(weight, gathered)

    temp, collectives = {}, {}
    for name, policy in (
        ("remat", None),
        ("keep", jc.recipes.save_names(dict.fromkeys(NAMES, "keep"))),
        ("float8", jc.recipes.save_names(dict.fromkeys(NAMES, jc.Float8()))),
        ("offload", jc.recipes.save_names(NAMES)),
    ):
        gradient = _step(policy, gather)
        step = jax.jit(lambda w, x, gradient=gradient: jax.tree.map(jnp.add, w, gradient(w, x)))
        report = analyze(step, weights, x, target="h100:8")
        temp[name], collectives[name] = report.temp_bytes, report.collective_bytes
        with capsys.disabled():
            print(f"\nh100:8, {name}: {report.temp_bytes / 2**20:.0f} MiB a device")
            print(f"  {report.collective_bytes / 2**20:.0f} MiB of collectives")
    values = LAYERS * 8 * 512 * (width + hidden) * 2  # of a device, in bfloat16
    assert temp["keep"] > temp["remat"] + 0.8 * values
    assert temp["float8"] < temp["remat"] + 0.6 * values
    assert temp["offload"] < temp["float8"] - 0.3 * LAYERS * 8 * 512 * hidden
    # Gradients of gathered weights are scattered, also where their products decode.
    assert max(collectives["float8"], collectives["offload"]) < 1.02 * collectives["keep"]
