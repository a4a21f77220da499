"""The program `reft-cli`: imports the command line, and runs that command line."""

from reft.interrupts import ended_by_interrupts


def main() -> None:
    """Runs `reft-cli`. Ctrl-C during the imports ends the process at once."""
    with ended_by_interrupts():
        from reft.cli.main import main as run
    run()
