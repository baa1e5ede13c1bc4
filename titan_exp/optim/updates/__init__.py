"""Updates of the optimizers, as classes of torch.optim.Optimizer."""
