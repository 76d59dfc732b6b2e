"""What a reader of the step may skip: ranks, shards, faults, loading, saving, the command line, the screen."""
