"""`python -m autopar`, the same as `autopar`."""

from autopar.cli import main

main()
