import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.reproduce import pooling as module
from experiments.training.config import TrainConfig
from jaxcomp.models import catalog
from jaxcomp.planning import Strategy

CONFIG = TrainConfig(model="tiny", dataset="tiny", epochs=1, batch=16)


def create(config):
    model = catalog.create("tiny", num_classes=4, image_size=8, in_channels=1, rngs=nnx.Rngs(0))
    Strategy.parse(config.strategy)(model).eval()
    return model


def test_alignment():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 40, 3, 5))
    rotation = np.linalg.qr(rng.normal(size=(15, 15)))[0]
    rotated = 7 * a.reshape(40, 15) @ rotation + 3
    assert module.alignment(a, rotated) == pytest.approx(1)
    assert 0 < module.alignment(a, b) < 0.5


def test_overlap():
    a = np.arange(100.0).reshape(1, 10, 10)
    assert module.overlap(a, 2 * a) == 1
    assert module.overlap(a, -a) == 0


def test_grad_cam_weighs_maps_by_the_head_of_the_class(tiny):
    model = create(CONFIG)
    images = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 8, 1)), jnp.float32)
    labels = jnp.array([3, 1])
    maps = module.features(model, images)
    assert len(maps) == 3
    kernel = model.head.kernel[...]
    expected = jnp.einsum("bhwc,cb->bhw", maps[-1], kernel[:, labels]) / 16
    cam = module.grad_cam(model, maps[-1], labels)
    np.testing.assert_allclose(cam, jax.nn.relu(expected), rtol=1e-4, atol=1e-6)
    logits = model.head(maps[-1].mean((1, 2)))
    np.testing.assert_allclose(logits, model(images), rtol=1e-5, atol=1e-6)


def test_study_writes_its_figures(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "load", lambda name, data_dir: tiny)
    monkeypatch.setattr(module, "IMAGES", 8)
    monkeypatch.setattr(module, "trained", lambda config, folder, dataset: create(config))
    module.study(CONFIG, ["plain", "pooling:window=2"], [0, 1], tmp_path, tmp_path)
    found = json.loads((tmp_path / "features.json").read_text())["against_plain"]
    assert list(found) == ["plain, another seed", "pooling:window=2"]
    for result in found["pooling:window=2"]:  # the same parameters, and the forward pass is exact
        assert result["alignment"] == pytest.approx([1] * 3)
        assert result["grad_cam_overlap"] == 1
    assert (tmp_path / "features.png").exists()
    assert "pooling:window=2 | 1.000" in (tmp_path / "features.md").read_text()
