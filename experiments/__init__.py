"""Training experiments with jaxcomp: data, training and the scripts that reproduce the tables."""
