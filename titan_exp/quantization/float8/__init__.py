"""Float8 recipes: tensorwise and rowwise."""
