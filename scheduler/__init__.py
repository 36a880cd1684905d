"""The scheduler: which prompt next, which groups make a batch. Needs neither torch nor vllm."""
