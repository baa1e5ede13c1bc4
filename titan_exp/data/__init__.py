"""Sources, tokenizers, and an order of tokens that belongs to the experiment, whatever the layout."""
