"""What runs a plan: data, model, executor, optimizer, checkpoints."""
