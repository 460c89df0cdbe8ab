"""Shared by all packages above: barriers, choices by platform, types in `jax.shard_map`."""
