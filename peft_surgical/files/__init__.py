"""What is on disk: the check of the base, encodings, differences of checkpoints, inspection, merging."""
