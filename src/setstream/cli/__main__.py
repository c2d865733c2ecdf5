"""`python -m setstream.cli`."""

from setstream.cli import main

main()
