"""The names that come with the package; any other name in their places is a dotted one, of the user's own code."""

OPTIMIZERS = ("adamw", "sgd")
"""What `optimizer.name` may name."""

OBJECTIVES = ("language_modeling",)
"""Built-in values of `training.objective`."""

DECAYS = ("linear", "cosine", "sqrt")
"""What `lr_schedule.decay` may name."""

SOURCES = ("python_stdlib", "text", "huggingface", "tokens")
"""What `data.source` may name."""

TOKENIZERS = ("bytes", "store")
"""What `data.tokenizer` may name; anything else is a path."""

BYTES_VOCABULARY = 257
"""Tokens of the tokenizer `bytes`: 256 byte values and the end of a text."""

COMPILE_BACKENDS = ("inductor", "aot_eager", "eager", "cudagraphs")
"""What `compile.backend` may name."""
