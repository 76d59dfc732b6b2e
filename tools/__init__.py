"""What is run beside training, each as `python -m tools.NAME`."""
