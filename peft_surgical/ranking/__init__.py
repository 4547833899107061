"""Which layers matter for a task, and how sure we are."""
