"""Recurrent networks by a scan."""

import jax

from tests.zoo.losses import TOKENS, next_token
from tests.zoo.networks import of_function


def haiku_lstm():
    import haiku

    def forward(tokens):
        core = haiku.DeepRNN([haiku.LSTM(64), jax.nn.relu, haiku.LSTM(64)])
        x = haiku.Embed(64, 32)(tokens.T)
        outputs, _ = haiku.dynamic_unroll(core, x, core.initial_state(2))
        return haiku.BatchApply(haiku.Linear(64))(outputs).swapaxes(0, 1)

    model = haiku.without_apply_rng(haiku.transform(forward))
    params = jax.jit(model.init)(jax.random.key(0), TOKENS)
    return of_function(
        lambda params, tokens: (next_token(model.apply(params, tokens), tokens), ()), params, TOKENS
    )


def linen_gru():
    from flax import linen

    class Model(linen.Module):
        @linen.compact
        def __call__(self, tokens):
            x = linen.Embed(64, 32)(tokens)
            x = linen.Bidirectional(linen.RNN(linen.GRUCell(32)), linen.RNN(linen.GRUCell(32)))(x)
            return linen.Dense(64)(x)

    model = Model()
    params = jax.jit(model.init)(jax.random.key(0), TOKENS)
    return of_function(
        lambda params, tokens: (next_token(model.apply(params, tokens), tokens), ()), params, TOKENS
    )
