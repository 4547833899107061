"""The sizes of models with random weights: the options of their configs."""

LLAMA = {"vocab_size": 32_000, "max_position_embeddings": 2048}
SHAPES = {
    "bert-large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "llama-1b": {
        **LLAMA,
        "hidden_size": 2048,
        "num_hidden_layers": 20,
        "num_attention_heads": 32,
        "intermediate_size": 5504,
    },
    "llama-7b": {
        **LLAMA,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
    },
    "llama-13b": {
        **LLAMA,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "intermediate_size": 13824,
    },
    "tiny": {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    },
}
