"""Rollout workers: a vLLM engine, graders in child processes, the service that joins the run."""
