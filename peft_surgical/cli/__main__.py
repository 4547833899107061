"""`python -m peft_surgical.cli`, as `accelerate launch -m` takes it."""

from peft_surgical.cli import app


if __name__ == "__main__":
    app()
