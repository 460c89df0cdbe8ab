"""Random programs: what `checkpoint` promises for any function."""

import jax
import pytest

from tests.fuzz import checks, programs


@pytest.mark.parametrize("seed", range(30))
def test_a_random_program(seed):
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    program = programs.generate(seed, most=3)
    for kind, policy, calls in checks.checks_of(seed):
        try:
            failures = checks.check(program, kind, policy, calls)
        except checks.NotFinite:
            pytest.skip("overflows without jaxcomp")
        assert not failures, f"{program}\n{program.to_json()}"


def test_a_program_is_data():
    program = programs.generate(4)
    assert programs.Program.from_json(program.to_json()) == program == programs.generate(4)


def test_a_failure_is_minimised():
    """The operation that fails is left, alone."""
    program = programs.generate(4)
    name = program.items[0].name

    def fails(smaller):
        return f"{name}:" in str(smaller)

    assert fails(program) and len(program.items) > 1
    least = programs.minimised(program, fails)
    assert [item.name for item in least.items] == [name]
    assert (least.outer, least.dtype) == ("none", "float32")
