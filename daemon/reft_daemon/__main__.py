"""The program `reft-daemon`: imports the daemon, and runs that daemon."""

from reft.interrupts import ended_by_interrupts


def main() -> None:
    """Runs `reft-daemon`. Ctrl-C during the imports ends the process at once."""
    with ended_by_interrupts():
        from reft_daemon.main import main as run
    run()


if __name__ == "__main__":
    main()
