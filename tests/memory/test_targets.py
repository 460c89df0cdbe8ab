from importlib import metadata

import jax
import pytest
from jax.sharding import AbstractMesh

from jaxcomp import memory
from jaxcomp.memory._gpus import GPUS, target_config
from jaxcomp.memory._targets import resolve


@pytest.fixture
def no_wheels(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)


@pytest.fixture
def all_wheels(monkeypatch):
    monkeypatch.setattr(metadata, "distribution", lambda name: None)


def test_the_default_is_the_attached_device():
    assert resolve() == resolve(jax.default_backend())
    assert resolve().attached


def test_every_listed_target_resolves(all_wheels):
    names = memory.targets()
    assert len(names) == len(set(names))
    assert [resolve(name).name for name in names] == names


@pytest.mark.parametrize(
    ("name", "devices", "topology_name"),
    [
        ("h100", 1, "1x1x1"),
        ("a100:8", 8, "1x1x8"),
        ("h100:32", 32, "1x4x8"),
        ("v4", 1, "v4:1x1x1"),
        ("v5e", 1, "v5e:1x1"),
        ("v5e:4x4", 16, "v5e:4x4"),
        ("tpu7x", 1, "tpu7x:1x1x1"),
        ("tpu7x:1x1x1", 2, "tpu7x:1x1x1"),
        ("tpu7x:2x2x1", 8, "tpu7x:2x2x1"),
    ],
)
def test_topologies(all_wheels, name, devices, topology_name):
    target = resolve(name)
    assert target.devices == devices
    assert dict(target.topology_options)["topology_name"] == topology_name
    assert not target.attached


def test_jax_can_use_three_quarters_of_a_gpu(all_wheels):
    target = resolve("h100")
    assert target.capacity_bytes == 84_942_979_072
    assert target.usable_bytes == 84_942_979_072 * 3 // 4


def test_a_tpu_leaves_what_its_compiler_says(all_wheels):
    target = resolve("v5e")
    assert target.capacity_bytes == 16 * 2**30
    assert target.usable_bytes == int(15.75 * 2**30)


@pytest.mark.parametrize(
    "name", ["h1000", "gpu", "", "h100:0", "h100:", "h100:9", "h100:2x2", "v5e:4", "v4:2x2", "v5e:"]
)
def test_bad_names_are_errors_that_say_them(all_wheels, name):
    with pytest.raises(ValueError, match=f"target='{name}'"):
        resolve(name)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"cpu, h100, h200, a100, .* tpu7x"):
        resolve("b9000")


@pytest.mark.parametrize(("name", "extra"), [("h100", "gpu-aot"), ("v5e:2x2", "tpu-aot")])
def test_a_missing_wheel_names_the_extra(no_wheels, name, extra):
    with pytest.raises(ImportError, match=rf"pip install 'jaxcomp\[{extra}\]'"):
        resolve(name)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_target_config_states_the_gpu(gpu):
    text = target_config(gpu)
    assert text.count("{") == text.count("}")
    assert f"core_count: {gpu.cores}\n" in text
    assert f"device_memory_size: {gpu.memory_bytes}\n" in text
    assert f"major: {gpu.capability[0]} minor: {gpu.capability[1]} " in text


def test_mesh_of_attached_devices_is_a_real_one():
    mesh = memory.mesh("cpu", (2, 4), ("data", "model"))
    assert list(mesh.devices.flat) == jax.devices("cpu")[:8]


def test_mesh_of_absent_devices_is_abstract(all_wheels):
    mesh = memory.mesh("h100:8", (4, 2), ("data", "model"))
    assert isinstance(mesh, AbstractMesh)
    assert dict(mesh.shape) == {"data": 4, "model": 2}


@pytest.mark.parametrize(
    ("target", "shape"), [("h100:8", (4,)), ("h100:8", (16,)), ("v5e:2x2", (2,)), ("cpu", (9,))]
)
def test_mesh_of_the_wrong_size(all_wheels, target, shape):
    with pytest.raises(ValueError, match=rf"axis_shapes=\({shape[0]},\) needs {shape[0]} devices"):
        memory.mesh(target, shape, ("data",))
