"""The gRPC API: `Inference` with health and reflection, on the same way through the router as HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import grpc.aio
import orjson
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tandem.core.api_keys import Scope
from tandem.core.errors import CancelledError, InternalError, InvalidRequestError, StartupError, TandemError
from tandem.core.handoff import TokenLogprob
from tandem.core.ids import new_request_id
from tandem.core.output_grammar import OutputGrammar
from tandem.core.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from tandem.core.urls import host_port
from tandem.router.admission.slo_classes import SloRequest
from tandem.router.api.frontend import Frontend, stopping_error
from tandem.router.api.grpc_auth import MAX_CALLS, MAX_STREAMS, KeyInterceptor, abort, authorization, texts
from tandem.router.api.http.output_fields import constraint_grammar
from tandem.router.api.servers import TlsFiles, bind
from tandem.router.dispatch.inflight_request import GenerationRequest
from tandem.router.error_quoting import quoted
from tandem.router.output_formats.choice import ThoughtLimit
from tandem.router.serving.choices import ChoiceUpdate, WholeChoices
from tandem.router.serving.request_parser import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_WORDS,
    TokenizedModel,
    check_count,
    check_ids,
    kept_choices,
)
from tandem.router.serving.response_stream import ResponseStream, attend
from tandem.router.tokenization.chat_template import Rendering, check_variables_text
from tandem.router.workers.proto_convert import finish_to_wire, logprob_to_wire
from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc as i_grpc

_log = logging.getLogger(__name__)
SERVICE = i.DESCRIPTOR.services_by_name["Inference"].full_name
_SAMPLING_FIELDS = (
    "max_tokens", "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "ignore_eos", "logprobs", "min_tokens",
    "prompt_logprobs",
)  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant")
_HEALTH_S = 0.25
_DEFAULT_MAX_TOKENS = 16
_LOGPROBS_AT_ONCE = 128
_IDS_AT_ONCE = 65_536
R = TypeVar("R")


class GrpcDoor:
    """The server and its health; `start` binds, `run` keeps health true until cancelled, `stop` ends it."""

    def __init__(self, frontend: Frontend, *, is_shared: bool = False, tls: TlsFiles | None = None) -> None:
        self._frontend, self._is_shared, self._tls = frontend, is_shared, tls
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        options = [
            ("grpc.so_reuseport", int(is_shared)),  # else a second server would share the port unnoticed
            ("grpc.max_receive_message_length", frontend.settings.max_body_bytes),
            ("grpc.max_concurrent_streams", MAX_STREAMS),
        ]
        service = i.DESCRIPTOR.services_by_name["Inference"]
        messages = {f"/{SERVICE}/{method.name}": method.input_type for method in service.methods}
        guard = KeyInterceptor(frontend, messages, traced=(f"/{SERVICE}/Generate",))
        self._server = grpc.aio.server(interceptors=[guard], options=options, maximum_concurrent_rpcs=MAX_CALLS)
        self._inference = _Inference(frontend)
        i_grpc.add_InferenceServicer_to_server(self._inference, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. StartupError when it is taken."""
        if port and not self._is_shared:
            bind(host, port).close()  # gRPC would complain on stderr in its own words
        try:
            bound = self._add_port(host_port(host, port))
        except RuntimeError as error:
            why = "it is in use or may not be used"
            raise StartupError(
                f"cannot listen on {host}:{port} for gRPC", why=why, todo="choose another port"
            ) from error
        await self._server.start()
        return bound

    def _add_port(self, address: str) -> int:
        if self._tls is None:
            return int(self._server.add_insecure_port(address))
        pair = (self._tls.key.read_bytes(), self._tls.cert.read_bytes())
        return int(self._server.add_secure_port(address, grpc.ssl_server_credentials([pair])))

    async def run(self) -> None:
        while True:
            serving = health_pb2.HealthCheckResponse.SERVING
            state = serving if self._frontend.readiness.is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
            for service in ("", SERVICE):
                await self._health.set(service, state)
            await asyncio.sleep(_HEALTH_S)

    @property
    def busy(self) -> int:
        """Calls that are being answered."""
        return self._inference.busy

    async def end_health(self) -> None:
        """Report not healthy from now on; watchers receive that at once."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """No new calls; those in progress get `grace_s`."""
        await self._server.stop(grace_s)


class _Inference(i_grpc.InferenceServicer):
    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self.busy = 0

    async def Generate(  # type: ignore[override]  # noqa: N802 - the stub is written for synchronous servers
        self, request: i.GenerateRequest, context: Any
    ) -> None:
        self.busy += 1
        try:
            await self._generate(request, context)
        finally:
            self.busy -= 1

    async def _generate(self, request: i.GenerateRequest, context: Any) -> None:
        frontend, received_s = self._frontend, self._frontend.clock.now_s()
        call = frontend.begin("grpc", texts(context.invocation_metadata()), received_s)
        if call is not None:
            await context.send_initial_metadata(tuple(call.names.items()))
        try:
            caller = frontend.gate.admit(authorization(texts(context.invocation_metadata())), Scope.INFER)
            await frontend.intake.turn(caller.tenant)
            ask = replace(_ask(request), caller=caller, wish=_wish(request, context))
            works = await frontend.read(ask, received_s, call)
        except TandemError as error:
            frontend.refused("grpc", error, call)
            await abort(context, error)
            return
        except asyncio.CancelledError:  # the client left while its prompt was read
            frontend.refused("grpc", CancelledError("the request was cancelled"), call)
            raise
        failure: TandemError | None = None
        request_id = new_request_id("gen")
        try:
            with frontend.open(request_id, works, call) as answer:
                outcome: list[TandemError] = []
                await attend(answer, _deliver(answer, _Shown(request, works), context, outcome))
            failure = outcome[0] if outcome else None
        except TandemError as error:  # no worker could take the request
            frontend.refused("grpc", error)
            failure = error
        except Exception as error:  # noqa: BLE001 - RPC boundary
            failure = _bug(error, request_id)
            frontend.refused("grpc", failure)
        if failure is not None:
            await abort(context, failure)

    async def ListModels(self, request: i.ListModelsRequest, context: Any) -> i.ListModelsResponse:  # noqa: N802
        return await self._unary(context, self._list_models)

    async def Tokenize(self, request: i.TokenizeRequest, context: Any) -> i.TokenizeResponse:  # noqa: N802
        return await self._unary(context, lambda: self._tokenize(request))

    async def Detokenize(self, request: i.DetokenizeRequest, context: Any) -> i.DetokenizeResponse:  # noqa: N802
        return await self._unary(context, lambda: self._detokenize(request))

    async def _unary(self, context: Any, answer: Callable[[], Awaitable[R]]) -> R:
        self.busy += 1
        try:
            return await self._answered(context, answer)
        finally:
            self.busy -= 1

    async def _answered(self, context: Any, answer: Callable[[], Awaitable[R]]) -> R:
        try:
            caller = self._frontend.gate.admit(authorization(texts(context.invocation_metadata())), Scope.INFER)
            await self._frontend.intake.turn(caller.tenant)
            if self._frontend.readiness.is_draining:
                raise stopping_error()
            return await answer()
        except TandemError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - RPC boundary
            failure = _bug(error)
        self._frontend.refused("grpc", failure)
        await abort(context, failure)
        raise failure  # an aborted call ends above

    async def _list_models(self) -> i.ListModelsResponse:
        frontend = self._frontend
        return i.ListModelsResponse(
            models=[
                i.ServedModel(id=name, root=model.name, context_tokens=frontend.reader.context_tokens(model))
                for model in frontend.models
                for name in model.served_names
            ]
        )

    async def _tokenize(self, request: i.TokenizeRequest) -> i.TokenizeResponse:
        reader, model = self._frontend.reader, self._model_of(request.model)
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise InvalidRequestError("the prompt is missing", todo="set text or chat", param="prompt")
        if kind == "chat":
            ids = await reader.encode_chat(model, _messages(request.chat), _rendering(request.chat))
        else:
            special = not request.HasField("add_special_tokens") or request.add_special_tokens
            ids = await model.tokenizer.encode(request.text, add_special_tokens=special)
        response = i.TokenizeResponse(context_tokens=reader.context_tokens(model))
        for start in range(0, len(ids), _IDS_AT_ONCE):
            response.ids.extend(ids[start : start + _IDS_AT_ONCE])
            await asyncio.sleep(0)  # a text of megabytes has millions
        return response

    async def _detokenize(self, request: i.DetokenizeRequest) -> i.DetokenizeResponse:
        tokenizer = self._model_of(request.model).tokenizer
        check_ids("ids", request.ids, tokenizer.vocab_size)
        return i.DetokenizeResponse(text=await tokenizer.text_of(request.ids))

    def _model_of(self, name: str) -> TokenizedModel:
        return self._frontend.models.find(name) if name else self._frontend.models.only()


async def _deliver(answer: ResponseStream, shown: _Shown, context: Any, outcome: list[TandemError]) -> None:
    try:
        async for response in _responses(answer, shown):
            await context.write(response)
    except TandemError as error:
        outcome.append(error)
    except Exception as error:  # noqa: BLE001 - RPC boundary
        failure = _bug(error, answer.id)
        answer.cancel(failure)
        outcome.append(failure)


def _bug(error: Exception, request: str | None = None) -> InternalError:
    """`request`: its id; None for calls that have none."""
    _log.exception("answer failed", extra={"fields": {} if request is None else {"request": request}})
    return InternalError("the router failed", why=type(error).__name__, todo="report this")


class _Shown:
    """Parts of a request's answer besides its choices, and how many of those it wants when all are complete."""

    def __init__(self, request: i.GenerateRequest, works: Sequence[GenerationRequest]) -> None:
        (work,) = works
        self.kept, self._has_logprobs = work.kept, "logprobs" in work.options
        self._prompt = work.prompt if request.return_prompt_token_ids else ()

    async def response(
        self, answer: ResponseStream, updates: Sequence[ChoiceUpdate], *, is_first: bool
    ) -> i.GenerateResponse:
        """Log-probabilities are put in some at a time: other streams go on meanwhile."""
        response = i.GenerateResponse(id=answer.id)
        for update in updates:
            delta = response.choices.add(
                index=update.index, text=update.text, token_ids=update.tokens, finish=finish_to_wire(update.finish)
            )
            if self._has_logprobs:  # the best are chosen by them unasked
                await _fill(delta.logprobs, update.logprobs)
        if is_first:
            response.prompt_token_ids.extend(self._prompt)
            await _fill(response.prompt_logprobs, updates[0].prompt_logprobs or ())
        return response


async def _fill(wire: Any, logprobs: Sequence[TokenLogprob]) -> None:
    for start in range(0, len(logprobs), _LOGPROBS_AT_ONCE):
        wire.extend(map(logprob_to_wire, logprobs[start : start + _LOGPROBS_AT_ONCE]))
        if start:
            await asyncio.sleep(0)


async def _responses(answer: ResponseStream, shown: _Shown) -> AsyncIterator[i.GenerateResponse]:
    whole = WholeChoices(answer.choice_count) if shown.kept is not None else None
    is_first = True
    while (updates := await answer.next()) is not None:
        if whole is not None:
            whole.add(updates)
        else:
            yield await shown.response(answer, updates, is_first=is_first)
            is_first = False
    if whole is not None:
        yield await shown.response(answer, whole.choices(1, shown.kept), is_first=True)
    usage = answer.usage
    yield i.GenerateResponse(
        id=answer.id,
        finished=True,
        usage=i.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        ),
    )


def _ask(request: i.GenerateRequest) -> GenerationRequest:
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequestError("the prompt is missing", todo="set text, token_ids or chat", param="prompt")
    if kind == "chat" and request.echo:
        raise InvalidRequestError("a chat cannot be echoed", todo="send a text or token ids", param="echo")
    check_count("stop", len(request.stop), MAX_STOPS)
    check_count("bad_words", len(request.sampling.bad_words), MAX_WORDS)
    check_count("logit_bias", len(request.sampling.logit_bias), MAX_LOGIT_BIAS)
    check_count("stop_token_ids", len(request.sampling.stop_token_ids), MAX_STOP_TOKEN_IDS)
    sampling = _sampling(request.sampling)
    n = request.sampling.n if request.sampling.HasField("n") else 1
    kept = kept_choices(n, sampling.get("n") if request.sampling.HasField("best_of") else None)
    common: dict[str, Any] = {
        "api": "grpc",
        "served_model": request.model,
        "options": sampling,
        "stop": tuple(request.stop),
        "includes_stop": request.include_stop_str_in_output,
        "echoes": request.echo,
        "kept": kept,
        "is_whole": kept is not None,
        "bad_words": tuple(request.sampling.bad_words),
        "output_grammar": _output_grammar(request.structured_outputs),
        "thought_limit": _thought_limit(request.sampling),
        "cache_salt": request.cache_salt if request.HasField("cache_salt") else None,
        "cache_key": request.prompt_cache_key if request.HasField("prompt_cache_key") else None,
    }
    if kind == "chat":
        return GenerationRequest(messages=_messages(request.chat), rendering=_rendering(request.chat), **common)
    prompt = request.text if kind == "text" else request.token_ids.ids  # not copied: there may be too many
    return GenerationRequest(prompts=(prompt,), default_max_tokens=_DEFAULT_MAX_TOKENS, **common)


def _output_grammar(outputs: i.StructuredOutputs) -> OutputGrammar | None:
    kind = outputs.WhichOneof("kind")
    if kind is None:
        return None
    value = list(outputs.choice.texts) if kind == "choice" else getattr(outputs, kind)
    return constraint_grammar(kind, value, f"structured_outputs.{kind}", outputs.whitespace_pattern or None)


def _thought_limit(sampling: i.GenerateSampling) -> ThoughtLimit | None:
    name = "thinking_token_budget"
    return ThoughtLimit(sampling.thinking_token_budget, name) if sampling.HasField("thinking_token_budget") else None


def _wish(request: i.GenerateRequest, context: Any) -> SloRequest:
    return SloRequest(
        slo=request.slo_class if request.HasField("slo_class") else None,
        slo_param="slo_class",
        priority=request.priority if request.HasField("priority") else None,
        timeout_s=context.time_remaining(),
        timeout_param="the deadline",
    )


def _sampling(sampling: i.GenerateSampling) -> dict[str, Any]:
    given = {name: getattr(sampling, name) for name in _SAMPLING_FIELDS if sampling.HasField(name)}  # type: ignore[arg-type]
    if sampling.HasField("best_of"):
        given["n"] = sampling.best_of
    if sampling.HasField("prediction"):
        given["prediction"] = sampling.prediction
    if sampling.HasField("speculative") and not sampling.speculative:
        given["without_drafts"] = True
    if sampling.stop_token_ids:
        given["stop_token_ids"] = tuple(sampling.stop_token_ids)
    if sampling.allowed_token_ids:
        given["allowed_token_ids"] = tuple(sampling.allowed_token_ids)
    if sampling.logit_bias:
        given["logit_bias"] = tuple(sampling.logit_bias.items())
    return given


def _rendering(chat: i.ChatMessages) -> Rendering:
    continues = chat.continue_final_message
    return Rendering(
        adds_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continues,
        continues_last=continues,
        variables=_variables(chat.chat_template_kwargs),
    )


def _variables(text: str) -> dict[str, Any]:
    check_variables_text(text)
    try:
        variables = orjson.loads(text) if text else {}
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(
            "chat_template_kwargs is not valid JSON", why=str(error), param="chat_template_kwargs"
        ) from error
    if not isinstance(variables, dict):
        raise InvalidRequestError("chat_template_kwargs must be a JSON object", param="chat_template_kwargs")
    return variables


def _messages(chat: i.ChatMessages) -> tuple[dict[str, Any], ...]:
    if not chat.messages:
        raise InvalidRequestError("the chat is empty", todo="send at least one message", param="messages")
    check_count("messages", len(chat.messages), MAX_MESSAGES)
    for position, message in enumerate(chat.messages):
        if message.role not in _ROLES:
            why = f"it must be one of {', '.join(_ROLES)}"
            raise InvalidRequestError(
                f"the role is {quoted(message.role)}", why=why, param=f"messages[{position}].role"
            )
        if message.parts and message.content:
            where = f"messages[{position}].parts"
            raise InvalidRequestError("a message has both content and parts", todo="send one of them", param=where)
    return tuple(
        {"role": message.role, "content": "\n".join(message.parts) or message.content} for message in chat.messages
    )
