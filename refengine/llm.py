"""The front door: prompts in, text out.

    llm = LLM()                                     # the tiny model, V1, on the CPU
    llm.generate("Q: What is a block table?\\nA:")

`LLM` turns text into tokens, hands requests to an engine and steps it until they are done, and turns tokens
into text again. Which requests run when, and on which blocks, is entirely the engine's business.
vLLM: V0 and V1 entrypoints/llm.py LLM.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from refengine.config import EngineConfig, Options
from refengine.errors import ConfigError, IntegrityError, PartError, RequestError
from refengine.hashing import Adapter
from refengine.model.loader import load_model
from refengine.model.tokenizer import load_tokenizer
from refengine.outputs import OutputProcessor, RequestOutput
from refengine.parts import load_parts
from refengine.sampling import SamplingParams
from refengine.trace.observer import Observer
from refengine.v0.engine import LLMEngine
from refengine.v1.engine import EngineCore

Prompt = str | Sequence[int]  # text, or token ids
ENGINE_CLASSES: dict[str, type[EngineCore] | type[LLMEngine]] = {"v1": EngineCore, "v0": LLMEngine}


@dataclass(frozen=True)
class RequestOptions(Options):
    """What may be said about a request besides its prompt and its sampling."""

    priority: int = 0  # smaller is served first, with policy "priority"
    adapter: Adapter | None = None
    cache_salt: str | None = None  # keeps its blocks apart from those of any other salt
    report_full: bool = False  # announce reused blocks as KV events, on every lookup

    def __post_init__(self) -> None:
        self.check_kinds()
        if self.adapter is not None and not isinstance(self.adapter, Adapter):
            raise ConfigError(f"adapter must be an Adapter, not {self.adapter!r}")


class LLM:
    """A model and an engine around it. Options are the fields of `EngineConfig`; a misspelt one is refused."""

    def __init__(
        self, model: str = "tiny", *, observer: Observer | None = None, parts: Any = None, **options: Any
    ) -> None:
        """`model`: "tiny", "tiny-hybrid", a directory, a GGUF file, or "org/name" on the hub. `parts`: see
        `refengine.parts`.

        Raises: ConfigError, CheckpointError, PartError.
        """
        self.config = EngineConfig(model=model, **options)
        _check_device(self.config.device)
        decoder = load_model(model, getattr(torch, self.config.dtype), self.config.device)
        self.tokenizer = load_tokenizer(model)
        eos_token_ids = self.tokenizer.eos_token_ids if self.tokenizer else decoder.config.eos_token_ids
        engine = ENGINE_CLASSES[self.config.engine]
        self.engine = engine(self.config, decoder, eos_token_ids, observer, load_parts(parts))
        self._processors: dict[str, OutputProcessor] = {}
        self._counter = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        **request_options: Any,
    ) -> list[RequestOutput]:
        """Runs all prompts to their end, in one batch. Returns: one output per prompt, in order.

        `params`: one for all, or one per prompt. `request_options`: priority, cache_salt, adapter, report_full;
        each the same for all, or a list with one per prompt. A single bad prompt raises; in a list it fails alone,
        and its output has `error` set. If the call is interrupted, its requests are aborted and the engine stays
        usable.
        Raises: RequestError, ConfigError.
        """
        outputs = self._start(prompts, params, request_ids, request_options)
        if _is_single(prompts) and outputs[0].error is not None:
            raise outputs[0].error
        for _ in self._run(outputs):
            pass
        return outputs

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        **request_options: Any,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields each request's output after every step that added to it.

        The same object is yielded again and grows; `new_text` is what came since it was last yielded. Leaving the
        loop early aborts what is unfinished.
        """
        yield from self._run(self._start(prompts, params, request_ids, request_options))

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. Returns: False, with nothing changed, while a request runs."""
        return self.engine.reset_prefix_cache()

    def _start(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        request_ids: Sequence[str] | None,
        request_options: dict[str, Any],
    ) -> list[RequestOutput]:
        """Enters one request per prompt. A bad one gets an output with its error and touches nothing."""
        batch: Sequence[Any] = [prompts] if _is_single(prompts) else list(prompts)
        all_params = _one_each("params", SamplingParams() if params is None else params, len(batch))
        ids = _one_each(
            "request_ids", self._new_ids(len(batch)) if request_ids is None else request_ids, len(batch)
        )
        options = _each_options(request_options, len(batch))
        outputs: list[RequestOutput] = []
        try:
            for request_id, prompt, each, its_options in zip(ids, batch, all_params, options, strict=True):
                outputs.append(self._enter(request_id, prompt, each, its_options))
        except BaseException:  # Ctrl-C included: those already entered have nobody to step them
            self._abort(output.request_id for output in outputs if output.error is None)
            raise
        return outputs

    def _new_ids(self, count: int) -> list[str]:
        return [f"request-{next(self._counter)}" for _ in range(count)]

    def _enter(
        self, request_id: str, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> RequestOutput:
        text = prompt if isinstance(prompt, str) else None
        try:
            token_ids = self._encode(request_id, prompt)
            if params.stop and self.tokenizer is None:
                raise RequestError(request_id, "stop texts need a tokenizer, and the model came without one")
            self.engine.add_request(request_id, token_ids, params, **vars(options))
        except RequestError as error:
            return RequestOutput(request_id, text, [], finish_reason="error", error=error)
        processor = OutputProcessor(request_id, text, token_ids, params, self.tokenizer)
        self._processors[request_id] = processor
        return processor.output

    def _encode(self, request_id: str, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    request_id, "the model came without a tokenizer, so a prompt must be token ids"
                )
            try:
                return self.tokenizer.encode(prompt)
            except ValueError as error:
                raise RequestError(request_id, str(error)) from None
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
            raise RequestError(
                request_id, f"a prompt is text or a list of token ids, not {type(prompt).__name__}"
            )
        return list(cast(Sequence[int], prompt))

    def _run(self, outputs: Sequence[RequestOutput]) -> Iterator[RequestOutput]:
        """Steps the engine until these requests are done. Whatever happens, none of them stays behind.

        Somebody else may step the engine too, for example a `generate` inside a loop over a `stream`; so what is
        new is read off the outputs themselves and not off the steps taken here.
        """
        pending = {output.request_id: output for output in outputs if not output.finished}
        shown = {request_id: (0, 0) for request_id in pending}  # tokens, characters
        try:
            yield from (output for output in outputs if output.error is not None)
            while pending:
                changed = [
                    o for o in pending.values() if o.finished or len(o.token_ids) > shown[o.request_id][0]
                ]
                if not changed:
                    self._step()
                for output in changed:
                    output.new_text = output.text[shown[output.request_id][1] :]
                    shown[output.request_id] = len(output.token_ids), len(output.text)
                    if output.finished:
                        del pending[output.request_id]
                    yield output
        finally:
            self._abort(pending)

    def _abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests that nobody waits for any more. Mutates: the engine."""
        for request_id in request_ids:
            self._processors.pop(request_id, None)
            with suppress(PartError, IntegrityError):  # a part that broke the engine has been named already
                self.engine.finish(request_id)

    def _step(self) -> None:
        """One engine step, its tokens turned into text. Mutates: the outputs of the requests that took part."""
        for step in self.engine.step():
            processor = self._processors.get(step.request_id)
            if processor is None:  # whoever waited for it was interrupted
                continue
            if processor.process(step):
                self.engine.finish(step.request_id, "stop")
            if processor.output.finished:
                del self._processors[step.request_id]


def _is_single(prompts: object) -> bool:
    """Whether this is one prompt: a text, or a list that begins with a number (an empty list is no prompts).

    What is no list at all is one prompt too, and a bad one.
    """
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
        return True
    return bool(len(prompts) and isinstance(prompts[0], int))


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    """`value` for each of `count` prompts. Raises: ConfigError for a list of another length or kind."""
    kind: type = SamplingParams if name == "params" else str
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    values = list(value) if is_list else [value] * count
    if len(values) != count:
        raise ConfigError(f"{len(values)} {name} for {count} prompts; give one for each")
    for each in values:
        if not isinstance(each, kind):
            raise ConfigError(f"{name} must be {kind.__name__}, not {type(each).__name__}")
    return values


def _each_options(given: dict[str, Any], count: int) -> list[RequestOptions]:
    """The options of each of `count` prompts. Raises: ConfigError for a list of another length, or a bad option."""
    lists = {name: value for name, value in given.items() if isinstance(value, list)}
    for name, values in lists.items():
        if len(values) != count:
            raise ConfigError(f"{len(values)} {name} for {count} prompts; give one for each")
    shared = RequestOptions(**{name: value for name, value in given.items() if name not in lists})
    each = ({name: values[i] for name, values in lists.items()} for i in range(count))
    return [replace(shared, **its_own) for its_own in each]


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ConfigError(f"device {device!r} is not one that torch knows; use 'cpu' or 'cuda'") from None
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r} is not supported; use 'cpu' or 'cuda'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device 'cuda' was asked for, but torch sees no CUDA GPU here; `refengine doctor` tells more"
        )
