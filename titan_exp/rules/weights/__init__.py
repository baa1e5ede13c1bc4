"""Rules about the weights that a run begins with: the model that they were trained as, and their tokenizer."""
