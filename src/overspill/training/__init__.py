"""Training with what does not fit: activations, weights and their gradients in host memory or on disk."""
