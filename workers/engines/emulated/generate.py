"""Builds answers in vLLM's shapes, whole or as events."""

from dataclasses import dataclass
from time import time_ns
from typing import Any

from workers.engines.emulated.text import Sampler
from workers.engines.emulated.validate import Generation
from workers.engines.emulated.worker import EngineConfig


@dataclass(slots=True)
class _Choice:
    index: int
    sampler: Sampler
    length: int
    finish_reason: str


class Answer:
    """The answer to one request, step by step: step 0 opens a chat, step i gives token i - 1."""

    def __init__(self, request: Generation, config: EngineConfig, request_id: str) -> None:
        self._request = request
        prefix = "chatcmpl" if request.chat else "cmpl"
        self._kind = "chat.completion" if request.chat else "text_completion"
        self._id = f"{prefix}-{request_id}"
        self._model = config.model
        self._created = time_ns() // 1_000_000_000
        self._choices = [
            _choice(request, tokens, i * request.num_choices + k, k, config.seed)
            for i, tokens in enumerate(request.prompts)
            for k in range(request.num_choices)
        ]

    @property
    def num_steps(self) -> int:
        return max(choice.length for choice in self._choices)

    @property
    def num_tokens(self) -> int:
        return sum(choice.length for choice in self._choices)

    def whole(self) -> dict[str, Any]:
        choices = []
        for choice in self._choices:
            words = [choice.sampler.word(i) for i in range(choice.length)]
            text = "".join(words)
            entry: dict[str, Any] = {"index": choice.index}
            if self._request.chat:
                entry["message"] = {"role": "assistant", "content": text}
            else:
                entry["text"] = text
            entry["logprobs"] = self._logprobs(words)
            entry["finish_reason"] = choice.finish_reason
            choices.append(entry)
        return self._envelope(self._kind, choices)

    def events(self, step: int) -> list[dict[str, Any]]:
        """Events of one step; a finished choice has none."""
        kind = "chat.completion.chunk" if self._request.chat else self._kind
        if step == 0:
            if not self._request.chat:
                return []
            delta = {"role": "assistant", "content": ""}
            return [
                self._envelope(kind, [{"index": c.index, "delta": delta, "finish_reason": None}])
                for c in self._choices
            ]
        return [
            self._envelope(kind, [self._token(choice, step - 1)])
            for choice in self._choices
            if step <= choice.length
        ]

    def usage_event(self, usage: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._request.chat else self._kind
        return {**self._envelope(kind, []), "usage": usage}

    def _token(self, choice: _Choice, i: int) -> dict[str, Any]:
        word = choice.sampler.word(i)
        finish = choice.finish_reason if i == choice.length - 1 else None
        entry: dict[str, Any] = {"index": choice.index}
        if self._request.chat:
            entry["delta"] = {"content": word}
        else:
            entry["text"] = word
        return {**entry, "logprobs": self._logprobs([word]), "finish_reason": finish}

    def _logprobs(self, words: list[str]) -> dict[str, Any] | None:
        top = self._request.logprobs
        if top is None:
            return None
        if not self._request.chat:
            return {"tokens": words, "token_logprobs": [-0.5] * len(words)}
        likely = [{"token": f"t{k}", "logprob": -0.5 - k, "bytes": None} for k in range(top)]
        return {
            "content": [
                {"token": word, "logprob": -0.5, "bytes": None, "top_logprobs": likely}
                for word in words
            ]
        }

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


def usage_of(
    request: Generation, answer: Answer, config: EngineConfig, cached_tokens: int
) -> dict[str, Any]:
    prompt = sum(len(tokens) for tokens in request.prompts)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + answer.num_tokens,
        "completion_tokens": answer.num_tokens,
    }
    if config.prompt_tokens_details:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return usage


def _choice(request: Generation, tokens: list[int], index: int, variant: int, seed: int) -> _Choice:
    sampler = Sampler(tokens, variant, seed ^ request.seed)
    natural = max(sampler.natural_length, request.min_tokens)
    if request.ignore_eos or natural >= request.max_tokens:
        return _Choice(index, sampler, request.max_tokens, "length")
    return _Choice(index, sampler, natural, "stop")
