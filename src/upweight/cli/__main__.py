"""`python -m upweight.cli` is the command `upweight`."""

from upweight.cli import main

main()
