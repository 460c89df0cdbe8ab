import pytest
from jax import lax


@pytest.fixture
def as_on(monkeypatch):
    """Takes a platform's branch of every `lax.platform_dependent`, on whatever it runs."""

    def use(platform):
        def platform_dependent(*args, default, **others):
            return others.get(platform, default)(*args)

        monkeypatch.setattr(lax, "platform_dependent", platform_dependent)

    return use
