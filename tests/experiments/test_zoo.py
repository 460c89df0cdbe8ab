"""Stock networks, their steps, and the table that compares them."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import zoo as bench
from experiments.zoo import (
    convnext,
    densenet,
    diffusion,
    gpt2,
    llama,
    mobilenet,
    recurrent,
    resmlp,
    resnet_functions,
    resnet_linen,
    resnet_nnx,
    steps,
    swin,
    unet,
    unet3d,
    vgg,
)
from jaxcomp import memory
from jaxcomp.models import _efficientnet, _vit
from jaxcomp.planning import Strategy
from tests.helpers import slow

PARAMETERS = {
    "resnet50_nnx": 25_557_032,
    "resnet50_linen": 25_557_032,
    "resnet50_functions": 25_557_032,
    "resnet50_equinox": 25_557_032,
    "resnet18_nnx": 11_689_512,
    "resnet18_float32": 11_689_512,
    "resnet18_linen": 11_689_512,
    "convnext_t": 28_589_128,
    "efficientnet_b0": 5_288_548,
    "mobilenet_v3_large": 5_483_032,
    "densenet121": 7_978_856,
    "unet": 31_036_546,
    "unet3d": 31_194_083,
    "diffusion": 102_442_500,
    "vgg19": 143_667_240,
    "vgg19_bn": 143_678_248,
    "vit_s16": 22_050_664,
    "vit_b16": 86_567_656,
    "swin_t": 28_288_354,
    "gpt2": 124_439_808,
    "llama": 124_668_672,
    "resmlp_s24": 30_020_680,
    "gru": 3_411_200,
    "mamba": 3_652_864,
}

FUNCTIONS = SimpleNamespace(
    init=partial(resnet_functions.init, layers=(1, 1), classes=10),
    apply=partial(resnet_functions.apply, layers=(1, 1)),
    bottleneck=resnet_functions.bottleneck,
)
STAGES = ((1, 16, 1, 1, 3), (6, 24, 2, 2, 5))
small = partial(steps.images, batch=4, shape=(32, 32, 3))
words = partial(steps.tokens, batch=2, length=16)
nnx, linen = steps.of_nnx, steps.of_linen
SMALL = {
    "resnet_nnx": small(nnx, partial(resnet_nnx.ResNet, resnet_nnx.Bottleneck, (1, 1), 10)),
    "resnet_linen": small(
        linen, partial(resnet_linen.ResNet, (1, 1), resnet_linen.BottleneckResNetBlock, 10)
    ),
    "resnet_functions": small(steps.of_functions, FUNCTIONS),
    "resnet_nnx_basic": small(nnx, partial(resnet_nnx.ResNet, resnet_nnx.BasicBlock, (1, 1), 10)),
    "resnet_linen_basic": small(
        linen, partial(resnet_linen.ResNet, (1, 1), resnet_linen.ResNetBlock, 10)
    ),
    "convnext": small(nnx, partial(convnext.ConvNeXt, (1, 1), (16, 32), 10)),
    "efficientnet": small(linen, partial(_efficientnet.EfficientNet, STAGES, 10)),
    "mobilenet": small(nnx, partial(mobilenet.MobileNetV3, mobilenet.LARGE[3:5], 16, 10)),
    "densenet": small(nnx, partial(densenet.DenseNet, (1, 1, 1, 1), 8, 10)),
    "unet3d": small(
        nnx, partial(unet3d.UNet3D, (8, 16)), batch=2, shape=(8, 8, 8, 1), labels=(8, 8, 8)
    ),
    "diffusion": steps.Network(
        partial(
            nnx,
            partial(diffusion.DiffusionUNet, (32, 64), (False, True), blocks=1),
            loss_of=steps.denoising,
        ),
        *[jax.ShapeDtypeStruct((16, 16, 4), jnp.bfloat16)] * 2,
        batch=2,
        optimizer=steps.ADAMW,
    ),
    "swin": small(nnx, partial(swin.Swin, 16, (2, 2), (2, 2), image=32, window=4, classes=10)),
    "unet": small(linen, partial(unet.UNet, (8, 16)), labels=(32, 32)),
    "vgg": small(linen, partial(vgg.VGG, ((8, 1), (16, 2)), True, 32, 10)),
    "vit": small(nnx, partial(_vit.VisionTransformer, 32, 1, 2, 10, image=32)),
    "gpt2": words(nnx, partial(gpt2.GPT2, 32, 16, 32, 1, 2)),
    "llama": words(linen, partial(llama.Llama, 32, 32, 1, 4, 2, 64)),
    "resmlp": small(nnx, partial(resmlp.ResMLP, 1, 16, patch=8, size=32, classes=10)),
    "gru": words(nnx, partial(recurrent.GRU, 16, 1)),
    "mamba": words(nnx, partial(recurrent.Mamba, 16, 1)),
}


@pytest.fixture(autouse=True)
def _as_users_run_them():
    with jax.numpy_rank_promotion("allow"):
        yield


def parts(name, spec):
    """The loss of a small network, and the shapes of its arguments."""
    network = SMALL[name]
    _, (state, inputs, labels) = network.make_step(Strategy.parse(spec), network.batch)
    loss, _, _ = network.build(Strategy.parse(spec), inputs)
    return loss, (state.params, state.model_state, inputs, labels)


def filled(shape):
    """An array of this shape and dtype."""
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    return np.random.default_rng(0).uniform(0, 0.1, shape.shape).astype(shape.dtype)


# Long to compile, or of the same library and of the layers of others.
SELDOM = ("efficientnet", "densenet", "mobilenet", "llama", "vgg", "convnext")
SELDOM += ("resnet_nnx", "resnet_linen", "resnet_linen_basic")


# Of the classes of other networks here, in another width or dtype.
SAME = ("vit_b16", "vit_s16", "resnet18_float32", "vgg19", "densenet121")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SAME else []) for n in PARAMETERS]
)
def test_networks_have_the_published_number_of_parameters(name):
    network = steps.NETWORKS[name]
    inputs = jax.ShapeDtypeStruct((2, *network.inputs.shape), network.inputs.dtype)
    _, params, _ = network.build(Strategy.parse("plain"), inputs)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == PARAMETERS[name]


def test_every_network_has_a_known_number_of_parameters():
    assert PARAMETERS.keys() == steps.NETWORKS.keys()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in SELDOM else []) for n in SMALL],
)
def test_gradients_are_finite(name):
    loss, arguments = parts(name, "plain")
    value_and_gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, _), gradient = value_and_gradient(*jax.tree.map(filled, arguments))
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert any(leaf.any() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    "name", ["resnet_nnx_basic", slow("resnet_linen_basic"), slow("resnet_functions")]
)
def test_a_strategy_changes_what_is_saved(name):
    def saved(spec):
        loss, (params, *rest) = parts(name, spec)
        gradient = jax.value_and_grad(loss, has_aux=True)
        return memory.declared_residual_bytes(gradient, params, *rest)

    plain = saved("plain")
    assert saved("remat") < plain
    assert saved("quantize:bits=4") < plain / 2


def test_a_row_has_its_ratio_to_the_plain_row_of_the_same_network():
    names = {"network": "unet", "batch": 16, "target": "h100"}
    figures = {
        "total_bytes": 3 * 2**20,
        "argument_bytes": 2**20,
        "activation_bytes": 2**21,
        "hbm_traffic_bytes": None,
        "estimated_seconds": 0.004,
        "seconds": 4.0,
        "error": None,
    }
    plain = names | {"row": "plain"} | figures
    slower = {"activation_bytes": 2**20, "estimated_seconds": 0.005, "seconds": 6.0}
    row = names | {"row": "remat"} | figures | slower
    assert bench.cells(row, plain)[4:9] == ["3", "1", "1", "0.50", ""]
    assert bench.cells(row, plain)[-4:] == ["5.0", "1.25", "6", "1.50"]
    assert bench.cells(row, None)[7] == ""
    failed = names | {"row": "remat", "error": "ValueError: no"}
    assert bench.cells(failed, plain)[4:6] == ["failed: ValueError: no", ""]


def test_a_row_is_given_up_at_the_limit_of_time():
    answer = bench.in_own_process(0.1, "resnet18_linen", "h100", "plain", 1)
    assert answer == {"error": "not compiled within 0 s"}
