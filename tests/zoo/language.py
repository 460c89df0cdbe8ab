"""Decoders, encoder-decoders, mixtures of experts and state space models of tokens."""

import jax
import jax.numpy as jnp
from flax import nnx

from tests.helpers import normal
from tests.zoo.losses import TOKENS, next_token
from tests.zoo.networks import of_function, of_nnx

POSITIONS = jnp.broadcast_to(jnp.arange(32), (2, 32))
CAUSAL = jnp.broadcast_to(jnp.tril(jnp.ones((32, 32), bool)), (2, 32, 32))
HEADS = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 64, "num_heads": 4, "num_kv_heads": 2}
DECODER = {"vocab_size": 64, "rope_theta": 10_000, "norm_eps": 1e-6}
LAYERS = {"layers": 2, "attention_heads": 2, "ffn_dim": 64}
SIZES = {f"{part}_{size}": n for part in ("encoder", "decoder") for size, n in LAYERS.items()}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def of_tunix(module, model, **sizes):
    config = module.ModelConfig(**HEADS, head_dim=16, **sizes)

    def loss(model, tokens):
        return next_token(model(tokens, POSITIONS, None, CAUSAL)[0], tokens)

    return of_nnx(model(config, rngs=nnx.Rngs(0)), loss, TOKENS)


def qwen3():
    from tunix.models.qwen3 import model

    return of_tunix(model, model.Qwen3, **DECODER)


def qwen3_experts():
    from tunix.models.qwen3 import model

    return of_tunix(model, model.Qwen3, **DECODER, num_experts=4, num_experts_per_tok=2)


def llama3():
    from tunix.models.llama3 import model

    return of_tunix(model, model.Llama3, **DECODER)


def gemma3():
    from tunix.models.gemma3 import model

    sizes = {"num_embed": 64, "sliding_window_size": 8, "param_dtype": jnp.float32}
    return of_tunix(model, model.Gemma3, **sizes)


def mamba2():
    from mamba2_jax import Mamba2Config, Mamba2ForCausalLM

    sizes = {"state_size": 8, "head_dim": 16, "chunk_size": 8, "num_hidden_layers": 2}
    model = Mamba2ForCausalLM(
        Mamba2Config(vocab_size=64, hidden_size=32, **sizes), rngs=nnx.Rngs(0)
    )
    return of_nnx(model, lambda model, tokens: model(tokens, labels=tokens)["loss"], TOKENS)


def linen_experts():
    from nano_moe.config import NanoMoEConfig
    from nano_moe.model import NanoMoE

    sizes = {"vocab_size": 64, "n_layers": 2, "n_heads": 2, "d_model": 32, "d_ff": 64}
    model = NanoMoE(NanoMoEConfig(**sizes, block_size=32))
    params = model.init(jax.random.key(0), TOKENS)

    def loss(params, tokens, key):
        logits, balance = model.apply(params, tokens, deterministic=False, rngs={"dropout": key})
        return next_token(logits, tokens) + 0.01 * balance, ()

    return of_function(loss, params, TOKENS, jax.random.key(1))


def of_transformers(model, inputs):
    """A Flax model of transformers with dropout; `inputs` is what it is called with."""

    def loss(params, inputs, key):
        logits = model(**inputs, params=params, dropout_rng=key, train=True).logits
        return next_token(logits, inputs["decoder_input_ids"]), ()

    return of_function(loss, model.params, inputs, jax.random.key(1))


def whisper():
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_flax_whisper import (
        FlaxWhisperForConditionalGeneration,
    )

    config = WhisperConfig(
        **SIZES,
        vocab_size=64,
        num_mel_bins=8,
        d_model=32,
        max_source_positions=32,
        max_target_positions=32,
        dropout=0.1,
        **SPECIAL,
    )
    model = FlaxWhisperForConditionalGeneration(config, input_shape=(2, 8, 64))
    return of_transformers(
        model, {"input_features": normal((2, 8, 64)), "decoder_input_ids": TOKENS}
    )


def bart():
    from transformers import BartConfig
    from transformers.models.bart.modeling_flax_bart import FlaxBartForConditionalGeneration

    config = BartConfig(vocab_size=64, d_model=32, max_position_embeddings=32, **SIZES, **SPECIAL)
    model = FlaxBartForConditionalGeneration(config, input_shape=(2, 32))
    return of_transformers(model, {"input_ids": TOKENS[:, ::-1], "decoder_input_ids": TOKENS})
