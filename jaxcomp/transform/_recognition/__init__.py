"""Stock operations that an operation of `jaxcomp.ops` stands for."""
