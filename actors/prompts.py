"""Prompts as token ids: once, by the model's own tokenizer and chat template.

Invariant: a prompt is tokenized here and nowhere else, it is never cut, and completions are never
re-tokenized.
"""

from __future__ import annotations

from typing import Any

from actors.engine import PromptError
from protocol.config import ConfigError, ModelConfig
from protocol.messages import Prompt


class PromptEncoder:
    """Applies the chat template as `model.chat_template` says."""

    def __init__(self, tokenizer: Any, model: ModelConfig, max_prompt_tokens: int) -> None:
        """`tokenizer`: of transformers. Raises ConfigError where a template is missing."""
        self._tokenizer = tokenizer
        self._limit = max_prompt_tokens
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if model.chat_template == "always" and not has_template:
            raise ConfigError(
                f"model.chat_template: always, but the tokenizer in {model.path} has no chat "
                "template; add chat_template.jinja there, or set auto or never"
            )
        self._templated = has_template and model.chat_template != "never"

    def encode(self, prompt: Prompt, room: int | None = None) -> list[int]:
        """Token ids of `prompt`, of which there may be at most `room` besides the configured limit.

        Plain text is one user turn where the template is applied. Raises PromptError.
        """
        tokens = self._tokens(prompt)
        if not tokens:
            raise PromptError("the prompt has no tokens")
        if len(tokens) > self._limit:
            raise PromptError(
                f"the prompt has {len(tokens)} tokens, more than rollout.max_prompt_tokens "
                f"({self._limit})"
            )
        if room is not None and len(tokens) > room:
            raise PromptError(
                f"the prompt has {len(tokens)} tokens; the model's context leaves {room} beside "
                "the task's max_tokens"
            )
        return tokens

    def _tokens(self, prompt: Prompt) -> list[int]:
        if self._templated:
            turns = (
                [{"role": "user", "content": prompt}]
                if isinstance(prompt, str)
                else [{"role": turn.role, "content": turn.content} for turn in prompt]
            )
            try:
                text = self._tokenizer.apply_chat_template(
                    turns, add_generation_prompt=True, tokenize=False
                )
            except Exception as error:  # templates raise what they like
                raise PromptError(f"the chat template refuses the prompt: {error}") from None
            # The template writes the special tokens itself.
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if not isinstance(prompt, str):
            raise PromptError(
                "the prompt is a list of chat turns and no chat template is applied; give text, or "
                "a model with a chat template and model.chat_template auto or always"
            )
        return list(self._tokenizer(prompt)["input_ids"])
