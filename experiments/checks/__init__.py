"""Long runs of checks that `make nightly` has and `make test` does not."""
