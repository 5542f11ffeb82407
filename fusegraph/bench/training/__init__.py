"""Steps of training: models of the zoo, a loss head, optimisers, and whole steps of GPT-2; beside torch.compile."""
