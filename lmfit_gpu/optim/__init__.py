"""Optimisers as torch training loops use them: one call a batch, the loop in the hands of the user."""
