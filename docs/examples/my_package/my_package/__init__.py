"""A model, an optimizer, a data source and a learning-rate decay for titan_exp."""
