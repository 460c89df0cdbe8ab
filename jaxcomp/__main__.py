"""`python -m jaxcomp`: the command `jaxcomp`."""

from jaxcomp.memory._compiling import apart


def main() -> None:
    """Runs the command. Every compiler but those of attached GPUs and TPUs is a child process.

    Raises:
        SystemExit: If typer is not installed.
    """
    try:
        from jaxcomp.cli import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        raise SystemExit("jaxcomp: the command needs typer: pip install 'jaxcomp[cli]'") from error
    with apart():
        app(prog_name="jaxcomp")


if __name__ == "__main__":
    main()
