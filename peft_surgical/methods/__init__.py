"""What both methods share as methods of PEFT: adding, saving, loading, switching and unloading adapters."""
