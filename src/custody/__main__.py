"""`python -m custody` is the command line."""

from custody.cli import main

main()
