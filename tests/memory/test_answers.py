"""The cache of compilations survives what may happen to files, and follows no names in them."""

import gzip
import json
import os
import pathlib
import warnings

import jax
import pytest

from jaxcomp.memory import _answers as answers
from jaxcomp.memory._buffer_assignment import DUMPED

ANSWER = {
    "hlo_text": "HloModule m",
    "memory": {"temp_size_in_bytes": 8},
    "compile_seconds": 0.5,
    "xla_flag": None,
    "dump": dict.fromkeys(DUMPED, "text"),
}
CHANGES = {
    "a name that leads out": {"dump": {"../../stolen": "x"}},
    "an absolute name": {"dump": {"/tmp/stolen": "x"}},
    "a name too many": {"dump": dict.fromkeys([*DUMPED, "more"], "text")},
    "no text": {"dump": dict.fromkeys(DUMPED, 3)},
    "no counts": {"memory": {"temp_size_in_bytes": "8"}},
    "no memory": {"memory": None},
    "an unknown field": {"run": "rm"},
}
DAMAGES = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "flipped": lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
    "no gzip": lambda data: b"\0" * 100,
    "no JSON": lambda data: gzip.compress(b"{"),
    "deep": lambda data: gzip.compress(b"[" * 10**5),
    "no text": lambda data: gzip.compress(b"\xff\xfe"),
} | {
    name: lambda data, change=change: gzip.compress(json.dumps(ANSWER | change).encode())
    for name, change in CHANGES.items()
}


def test_what_was_written_is_read(tmp_path):
    file = tmp_path / "new" / "answer"
    assert answers.read(file) is None
    for answer in (ANSWER, ANSWER | {"dump": {}}):
        answers.write(file, answer)
        assert answers.read(file) == answer
    assert [path.name for path in file.parent.iterdir()] == ["answer"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_not_used(tmp_path, damage):
    file = tmp_path / "answer"
    answers.write(file, ANSWER)
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    with pytest.warns(UserWarning, match="answer is damaged .*; the step is compiled anew"):
        assert answers.read(file) is None
    answers.write(file, ANSWER)
    assert answers.read(file) == ANSWER


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="the result of a compilation is not kept: .*file"):
        answers.write(tmp_path / "file" / "answer", ANSWER)

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(answers.Path, "write_bytes", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        answers.write(tmp_path / "answer", ANSWER)
    with warnings.catch_warnings():
        assert answers.read(tmp_path / "answer") is None
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_files_that_were_not_read_for_the_longest_time_make_room(tmp_path, monkeypatch):
    files = [tmp_path / f"jaxcomp-{number}" for number in range(3)]
    for age, file in enumerate(files[:2]):
        answers.write(file, ANSWER)
        os.utime(file, (100 - age, 100 - age))
    (tmp_path / "of JAX").write_bytes(b" " * 10**4)
    assert answers.read(files[1]) == ANSWER
    monkeypatch.setattr(answers, "_MOST_BYTES", 2 * files[0].stat().st_size)
    answers.write(files[2], ANSWER)
    assert {path.name for path in tmp_path.iterdir()} == {"of JAX", "jaxcomp-1", "jaxcomp-2"}


def test_the_folder_is_that_of_jax_or_of_the_user(tmp_path, monkeypatch):
    before = jax.config.values["jax_compilation_cache_dir"]
    assert answers.folder() == pathlib.Path(before)
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert answers.folder() == tmp_path / "jaxcomp"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert answers.folder() == tmp_path / ".cache" / "jaxcomp"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
