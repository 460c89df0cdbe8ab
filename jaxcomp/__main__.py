"""`python -m jaxcomp`: the command `jaxcomp`."""

from jaxcomp.cli import app
from jaxcomp.memory._compiling import apart


def main() -> None:
    """Runs the command. Every compiler but those of attached GPUs and TPUs is a child process."""
    with apart():
        app(prog_name="jaxcomp")


if __name__ == "__main__":
    main()
