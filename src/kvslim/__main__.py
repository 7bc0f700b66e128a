"""`python -m kvslim` is the `kvslim` command."""

from kvslim.cli import main

main()
