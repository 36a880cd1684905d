"""What two processes must agree on: messages, codec, topics, versions, config and metric names.

Imports neither torch nor vllm, so that a scheduler image stays small.
"""

__version__ = "0.1.0"
