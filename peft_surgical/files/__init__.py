"""What is on disk: files of tensors, encodings, saved adapters, checkpoints, and the check of the base."""
