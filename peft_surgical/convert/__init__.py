"""Make, change and look at the files of adapters, and merge them into checkpoints."""
