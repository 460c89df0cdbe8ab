import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.training.checkpoint import Checkpoints
from jaxcomp.models.training import TrainState


def state(step):
    return TrainState(jnp.int32(step), {"w": jnp.arange(1000.0) * step}, {}, ())


@pytest.fixture
def folder(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(state(step), {"steps": step})
    return tmp_path


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_a_full_disk_is_told_before_anything_is_written(folder, monkeypatch):
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4003))
    with pytest.raises(OSError, match=r"4,003 bytes are free, a checkpoint takes 4,004"):
        Checkpoints(folder).save(state(3), {})
    with pytest.raises(OSError, match="4,003 bytes are free"):
        Checkpoints(folder / "new" / "run").check_room(state(3))
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
    assert Checkpoints(folder).load_record() == {"steps": 2}


DAMAGES = {
    "damaged": flip,
    "missing": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_checkpoint_before_a_damaged_one_is_loaded(folder, damage):
    files = [p for p in (folder / "2").rglob("*") if p.is_file() and p.name != "sha256.json"]
    assert any("record" in str(p) for p in files) and any("state" in str(p) for p in files)
    for path in files:
        whole = path.read_bytes()
        DAMAGES[damage](path)
        told = f"checkpoint 2: {path.relative_to(folder / '2').as_posix()} is"
        with pytest.warns(UserWarning, match=f"{told} .*; checkpoint 1 is loaded"):
            assert Checkpoints(folder).load_record() == {"steps": 1}
        with pytest.warns(UserWarning):
            loaded = Checkpoints(folder).load_state(state(0))
        assert int(loaded.step) == 1
        np.testing.assert_array_equal(loaded.params["w"], state(1).params["w"])
        path.write_bytes(whole)
    assert int(Checkpoints(folder).load_state(state(0)).step) == 2


def test_damage_of_all_checkpoints_is_an_error(folder):
    for step in "12":
        flip(next((folder / step / "record").iterdir()))
    with pytest.raises(ValueError, match=r"is whole: checkpoint 2: record.* checkpoint 1: record"):
        Checkpoints(folder).load_record()
