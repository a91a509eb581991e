"""Optimizers for training loops of torch."""
