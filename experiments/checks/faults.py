"""Shows what kills, damaged files, bad inputs and failing rows do: none lost, none silent.

python -m experiments.checks.faults --out experiments/results/faults
"""

from typing import Annotated, Any

import typer

from experiments.checks import bad_inputs, damages, failing_rows, kills
from experiments.common.options import Out, usage_errors
from experiments.common.record import describe_environment, write_json, write_table


@usage_errors()
def main(
    out: Out,
    runs_killed: Annotated[int, typer.Option("--kills", help="Kills of a training run.")] = 20,
    files: Annotated[int, typer.Option(help="Damaged files.")] = 200,
    commands: Annotated[int, typer.Option(help="Commands ended by a signal.")] = 9,
    seed: Annotated[int, typer.Option(help="Seed of moments, files and places.")] = 0,
) -> None:
    """Try every fault; fail if anything is lost or silent."""
    content: dict[str, Any] = describe_environment() | {
        "bad inputs": bad_inputs.run(),
        "damaged files": damages.run(files, seed),
        "failing rows": failing_rows.run(),
        "commands ended by a signal": failing_rows.killed_commands(commands),
    }
    table = [["fault", "tried", "told, with nothing lost"]]
    table += [
        [name, str(len(rows)), str(sum(bool(row["told"]) for row in rows))]
        for name, rows in content.items()
        if isinstance(rows, list) and rows and "told" in rows[0]
    ]
    if runs_killed:
        content["kills of a training run"], different = kills.run(runs_killed, seed)
        resumed = f"{runs_killed} resumed; {different} of the runs differ from an unbroken one"
        table.append(["kills of a training run", str(runs_killed), resumed])
        if not different:
            table[-1][-1] = str(runs_killed)
    write_json(out / "faults.json", content)
    title = "What is tried, and how often it is told and nothing is lost:"
    typer.echo(write_table(out / "faults.md", title, table, content["command"]))
    if any(tried != told for _, tried, told in table[1:]):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
