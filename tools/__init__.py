"""Command-line tools for use before and after training: `python -m tools.NAME`."""
