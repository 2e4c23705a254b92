"""`python -m autopar`, the same as `autopar`."""

import os
import signal


def main() -> None:
    """Run the command line. Until a command works, Ctrl-C just ends the process: there is nothing to keep yet."""
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    from autopar.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
