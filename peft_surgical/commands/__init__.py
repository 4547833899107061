"""The commands of `peft-surgical`, one per file."""
