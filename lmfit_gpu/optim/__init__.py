<<<<<<< .merge_file_8QetYE
"""Optimizers for training loops of torch."""
=======
"""Optimisers as torch training loops use them: one call a batch, the loop in the hands of the user."""
>>>>>>> .merge_file_rHSLBe
