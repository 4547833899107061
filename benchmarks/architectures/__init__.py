"""Every architecture of transformers that builds tiny from its config: what works on them."""
