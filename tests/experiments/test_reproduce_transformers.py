import itertools
import json

import jax
import numpy as np
import pytest
import typer
from flax import nnx

from experiments.reproduce import runs, tasks
from experiments.reproduce import transformers as module
from jaxcomp.models._lm import Shape


def run(loss, accuracy):
    return {
        "loss": [2.0],
        "validation_loss": loss,
        "validation_accuracy": accuracy,
        "declared_bytes": 2**20,
        "temp_bytes": None,
    }


def test_crops_of_the_text_are_the_same_for_a_seed():
    data = np.arange(200, dtype=np.uint8)
    one, two = (list(itertools.islice(tasks.crops(data, 4, seed=5), 3)) for _ in range(2))
    for (tokens, following), (again, _) in zip(one, two, strict=True):
        np.testing.assert_array_equal(tokens, again)
        np.testing.assert_array_equal(np.diff(tokens), 1)
        np.testing.assert_array_equal(following, tokens + 1)
        assert tokens.shape == (4, tasks.LENGTH)


def test_epochs_go_on_in_another_order():
    task = tasks.vision(batch=4000)
    first, second, third = itertools.islice(task.train(0), 3)
    assert not np.array_equal(first[1], third[1])
    both = np.concatenate([first[1], second[1]])
    np.testing.assert_array_equal(np.bincount(both), 800)


def test_text_that_is_held_out_is_not_trained_on(monkeypatch):
    seen = []
    monkeypatch.setattr(tasks, "text", lambda: np.arange(2000) // 8 % 256)
    monkeypatch.setattr(tasks, "crops", lambda data, *_, **__: seen.append(data) or iter(()))
    task = tasks.language()
    task.train(0), list(task.held_out())
    train, held_out = seen
    np.testing.assert_array_equal(np.concatenate([train, held_out]), tasks.text())
    assert len(held_out) == 200


def test_a_run_learns_and_its_end_is_held_out(monkeypatch):
    monkeypatch.setattr(tasks, "LENGTH", 16)
    monkeypatch.setattr(tasks, "LANGUAGE_MODEL", Shape(width=16, depth=1, heads=2))
    of_task = runs.Runs(tasks.language(), "remat", steps=60)
    found, again = of_task.run(seed=1), of_task.run(seed=1)
    assert found == again
    assert found["declared_bytes"] > 0
    assert len(found["loss"]) == 60 // runs.SMOOTHING
    assert found["loss"][-1] < found["loss"][0] - 1
    assert found["validation_loss"] == pytest.approx(found["loss"][-1], abs=0.5)
    assert 0.1 < found["validation_accuracy"] < 0.9


def test_adapters_change_what_a_trained_model_says_and_nothing_else_of_it(monkeypatch):
    monkeypatch.setattr(tasks, "LENGTH", 16)
    monkeypatch.setattr(tasks, "LANGUAGE_MODEL", Shape(width=16, depth=1, heads=2))
    monkeypatch.setattr(tasks, "PRETRAINING", 100)
    language, _ = runs.Runs(tasks.language(), "plain", 100).train(seed=0)
    of_task = runs.Runs(tasks.adapters(), "transformer:bits=4", steps=200)
    start = jax.tree.map(np.array, of_task.start(seed=1))
    end, _ = of_task.train(seed=1)
    batches = list(of_task.task.held_out())
    before, after = (
        np.mean([of_task.evaluate(state, *batch).loss for batch in batches])
        for state in (start, end)
    )
    assert after < before - 0.05
    assert {path[-1] for path, _ in nnx.to_flat_state(start.params)} == {"lora_a", "lora_b"}
    frozen = nnx.filter_state(start.model_state, nnx.Param)
    for kept in (language.params, nnx.filter_state(end.model_state, nnx.Param)):
        for ours, theirs in zip(jax.tree.leaves(frozen), jax.tree.leaves(kept), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_noise_is_what_a_denoiser_predicts():
    task = tasks.diffusion(batch=64)
    (images, noise), (others, other_noise) = itertools.islice(task.train(0), 2)
    assert images.shape == noise.shape == (64, 14, 14, 1)
    assert noise.std() == pytest.approx(1, abs=0.05)
    assert not np.array_equal(images, others)
    assert abs(np.corrcoef(noise.ravel(), other_noise.ravel())[0, 1]) < 0.05
    perfect = task.loss(lambda noisy, times: noise, images, noise)[0]
    assert perfect == 0 < task.loss(lambda noisy, times: noisy, images, noise)[0]


def test_seeds_are_compared_in_pairs(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "Runs", lambda *_: pytest.fail("all runs are there"))
    (tmp_path / "lm" / "runs").mkdir(parents=True)
    figures = {"plain": [(1.0, 0.5), (2.0, 0.5)], "remat": [(1.1, 0.51), (2.3, 0.53)]}
    for name, seeds in figures.items():
        for seed, (loss, accuracy) in enumerate(seeds):
            file = tmp_path / "lm" / "runs" / f"{name}-{seed}-20.json"
            file.write_text(json.dumps(run(loss, accuracy)))
    module.main(tmp_path, task=["lm"], strategy=["plain", "remat"], seeds=2, steps=20)
    text = (tmp_path / "lm" / "runs.md").read_text()
    # Mean differences of 0.2 and 2, and 12.706 (Student, one degree of freedom) times their errors.
    assert "| remat | 1.7000 ± 0.8485 | +0.2000 ± 1.2706 | 52.00% ± 1.41% | +2.00 ± 12.71 |" in text
    assert (tmp_path / "lm" / "runs.png").exists()


def test_a_task_without_labels_has_no_accuracy():
    table = module.rows({"plain": [run(1.0, None), run(1.2, None)]})
    assert table[1][1:5] == ["1.1000 ± 0.1414", "+0.0000 ± 0.0000", "", ""]


def test_an_unknown_task_is_refused(tmp_path):
    with pytest.raises(typer.BadParameter, match=r"task=\['gan'\]: expected of \['lm', 'vit', "):
        module.main(tmp_path, task=["gan"])
