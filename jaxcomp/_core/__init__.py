"""Shared foundations: barriers, choices by platform, types in `jax.shard_map`, module scopes."""
