import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.training import checkpoint
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


def sums(text):
    return lambda folder: (folder / "sha256.json").write_text(text)


def other_record(**fields):
    """Another record, with sums that are right."""

    def change(folder):
        file = folder / "record" / "metadata"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        (folder / "sha256.json").write_text(json.dumps(checkpoint._checksums(folder)))

    return change


OF_FILES = {
    "damaged": flip,
    "missing": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
}
OF_FOLDERS = {
    "empty": (lambda folder: [shutil.rmtree(folder), folder.mkdir()], "sha256.json is missing"),
    "no sums": (lambda folder: (folder / "sha256.json").unlink(), "sha256.json is missing"),
    "a number for sums": (sums("3"), "sha256.json is damaged"),
    "null for sums": (sums("null"), "sha256.json is damaged"),
    "a list for sums": (sums("[]"), "sha256.json is damaged"),
    "deep sums": (sums("[" * 10**5), "sha256.json is damaged"),
    "another format": (other_record(format=7), "format 7, expected 1: another version"),
    "another step": (other_record(step=9), "it is of step 9"),
}


@pytest.mark.parametrize("damage", OF_FILES)
def test_the_checkpoint_before_a_damaged_one_is_loaded(folder, damage):
    names = [
        path.relative_to(folder / "2")
        for path in (folder / "2").rglob("*")
        if path.is_file() and path.name != "sha256.json"
    ]
    assert any("record" in str(n) for n in names) and any("state" in str(n) for n in names)
    shutil.copytree(folder / "2", folder / "whole")
    for name in names:
        OF_FILES[damage](folder / "2" / name)
        told = rf"checkpoint 2: {name.as_posix()} is .* moved to 2\.damaged; checkpoint 1 is loaded"
        with pytest.warns(UserWarning, match=told):
            assert Checkpoints(folder).load_record() == {"steps": 1}
        shutil.rmtree(folder / "2.damaged")
        shutil.copytree(folder / "whole", folder / "2")
    assert int(Checkpoints(folder).load_state(state(0)).step) == 2


@pytest.mark.parametrize("damage", OF_FOLDERS)
def test_saving_goes_on_after_a_damaged_checkpoint(folder, damage):
    change, told = OF_FOLDERS[damage]
    for number in ("", "-2"):
        change(folder / "2")
        checkpoints = Checkpoints(folder)
        with pytest.warns(UserWarning, match=rf"{told}.* 2\.damaged{number}; checkpoint 1 is"):
            loaded = checkpoints.load_state(state(0))
        np.testing.assert_array_equal(loaded.params["w"], state(1).params["w"])
        checkpoints.save(state(2), {"steps": 2})
    assert sorted(p.name for p in folder.iterdir()) == ["1", "2", "2.damaged", "2.damaged-2"]
    assert Checkpoints(folder).load_record() == {"steps": 2}


def test_only_two_whole_ones_let_an_older_one_be_deleted(folder):
    checkpoints = Checkpoints(folder)
    checkpoints.save(state(3), {})  # 2 may be damaged, and was not verified
    assert sorted(p.name for p in folder.iterdir()) == ["1", "2", "3"]
    checkpoints.save(state(4), {})
    assert sorted(p.name for p in folder.iterdir()) == ["3", "4"]


def test_an_unfinished_checkpoint_does_not_count(folder):
    (folder / "3").mkdir()
    (folder / "3").rename(folder / "unfinished")
    (folder / "unfinished" / "state").write_text("half")
    checkpoints = Checkpoints(folder)
    assert checkpoints.load_record() == {"steps": 2}
    checkpoints.save(state(3), {"steps": 3})
    assert Checkpoints(folder).load_record() == {"steps": 3}


def test_a_record_of_an_older_version_is_loaded(folder):
    file = folder / "2" / "record" / "metadata"
    file.write_text('{"steps": 2}')
    (folder / "2" / "sha256.json").write_text(json.dumps(checkpoint._checksums(folder / "2")))
    assert Checkpoints(folder).load_record() == {"steps": 2}


def test_damage_of_all_checkpoints_is_an_error(folder):
    for step in "12":
        flip(next((folder / step / "record").iterdir()))
    told = "checkpoint 2: record.* checkpoint 1: record.* none is left"
    with (
        pytest.warns(UserWarning, match=told),
        pytest.raises(ValueError, match=r"is whole; damaged: 1\.damaged, 2\.damaged"),
    ):
        Checkpoints(folder).load_record()
