"""The learner: GRPO on released batches, and what it publishes."""
