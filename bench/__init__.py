"""What makes the numbers on the pages: `python -m bench.NAME`."""
