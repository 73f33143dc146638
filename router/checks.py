"""What of a GenerateRequest can be refused without tokenizer and model."""

from __future__ import annotations

from graftree import grammar
from graftree.acceptance import Rule
from graftree.config import RouterConfig
from graftree.errors import InvalidArgument
from graftree.sampling import GREEDY, SamplingParams
from graftree.tree import MAX_TREE_DEPTH, MAX_TREE_NODES
from graftree.v1 import generation_pb2 as pb
from graftree.v1.common_pb2 import LogProbsMode

MAX_MESSAGES = 4096  # of a chat
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKENS = 64
MAX_ALTERNATIVES = 20
MAX_SAMPLES = 16
MAX_PRIORITY = 100  # and the least is its negative


def check(request: pb.GenerateRequest, config: RouterConfig) -> None:
    """Everything that can be told without tokenizer and model.

    Raises:
        InvalidArgument: names the first field that is out of range, its value and the limit.
    """
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidArgument("input", "", "exactly one of prompt, token_ids and chat")
    if kind == "chat" and not request.chat.messages:
        raise InvalidArgument("chat.messages", 0, "at least one message")
    if len(request.chat.messages) > MAX_MESSAGES:
        raise InvalidArgument("chat.messages", len(request.chat.messages), f"at most {MAX_MESSAGES}")
    size = (
        len(request.prompt.encode())
        if kind == "prompt"
        else sum(len(message.role.encode()) + len(message.content.encode()) for message in request.chat.messages)
    )
    if size > config.max_prompt_bytes:
        raise InvalidArgument(kind, size, f"at most {config.max_prompt_bytes} bytes of text")
    sampling = SamplingParams.from_proto(request.sampling) if request.HasField("sampling") else GREEDY
    sampling.validate()
    if request.HasField("n") and not 1 <= request.n <= MAX_SAMPLES:
        raise InvalidArgument("n", request.n, f"1 to {MAX_SAMPLES} samples")
    if request.n > 1 and sampling.greedy:
        raise InvalidArgument("n", request.n, "1 at sampling.temperature 0: greedy samples are all the same")
    if abs(request.priority) > MAX_PRIORITY:
        raise InvalidArgument("priority", request.priority, f"-{MAX_PRIORITY} to {MAX_PRIORITY}")
    if request.HasField("structured_output"):
        grammar.check(request.structured_output)
    _check_resume(request)
    _check_stopping(request.stopping)
    _check_output(request.output)
    _check_speculation(request.speculation)


def _check_resume(request: pb.GenerateRequest) -> None:
    counts = request.resume_after
    if counts and not request.request_id:
        raise InvalidArgument("request_id", "", "the id of the generation to resume")
    if counts and len(counts) != (request.n or 1):
        raise InvalidArgument("resume_after", f"{len(counts)} counts", f"one for each of {request.n or 1} samples")
    if not request.HasField("recollection"):
        return
    lengths = [len(sample.ids) for sample in request.recollection.samples]
    if not counts or lengths != list(counts):
        limit = f"as many as resume_after says, {list(counts)}" if counts else "unset without resume_after"
        raise InvalidArgument("recollection.samples", f"{lengths} tokens", limit)
    most = request.stopping.max_new_tokens
    for index, length in enumerate(lengths):
        if request.stopping.HasField("max_new_tokens") and length > most:
            limit = f"at most stopping.max_new_tokens, {most}"
            raise InvalidArgument(f"recollection.samples[{index}].ids", f"{length} tokens", limit)


def _check_stopping(stopping: pb.StoppingParams) -> None:
    if stopping.HasField("max_new_tokens") and stopping.max_new_tokens < 1:
        raise InvalidArgument("stopping.max_new_tokens", stopping.max_new_tokens, "at least 1")
    if stopping.HasField("max_new_tokens") and stopping.min_new_tokens > stopping.max_new_tokens:
        limit = f"at most max_new_tokens, {stopping.max_new_tokens}"
        raise InvalidArgument("stopping.min_new_tokens", stopping.min_new_tokens, limit)
    if len(stopping.stop) > MAX_STOP_STRINGS:
        raise InvalidArgument("stopping.stop", len(stopping.stop), f"at most {MAX_STOP_STRINGS} strings")
    for index, stop in enumerate(stopping.stop):
        if not 1 <= len(stop.encode()) <= MAX_STOP_STRING_BYTES:
            limit = f"1 to {MAX_STOP_STRING_BYTES} bytes"
            raise InvalidArgument(f"stopping.stop[{index}]", len(stop.encode()), limit)
    if len(stopping.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidArgument(
            "stopping.stop_token_ids", len(stopping.stop_token_ids), f"at most {MAX_STOP_TOKENS} tokens"
        )


def _check_output(output: pb.OutputParams) -> None:
    if output.alternatives > MAX_ALTERNATIVES:
        raise InvalidArgument("output.alternatives", output.alternatives, f"at most {MAX_ALTERNATIVES}")
    if output.alternatives and not output.log_probs:
        raise InvalidArgument("output.alternatives", output.alternatives, "0 without output.log_probs")
    if output.log_probs_mode not in LogProbsMode.values():
        known = ", ".join(name for name in LogProbsMode.keys()[1:])
        raise InvalidArgument("output.log_probs_mode", output.log_probs_mode, f"one of {known}")
    if output.log_probs_mode and not output.log_probs:
        raise InvalidArgument("output.log_probs_mode", output.log_probs_mode, "unset without output.log_probs")


def _check_speculation(speculation: pb.SpeculationParams) -> None:
    Rule.from_proto(speculation.mode, field="speculation.mode")
    if speculation.max_nodes > MAX_TREE_NODES:
        raise InvalidArgument("speculation.max_nodes", speculation.max_nodes, f"at most {MAX_TREE_NODES}")
    if speculation.off and speculation.max_nodes:
        raise InvalidArgument("speculation.max_nodes", speculation.max_nodes, "0 or unset with speculation.off")
    if speculation.HasField("max_depth") and not 1 <= speculation.max_depth <= MAX_TREE_DEPTH:
        raise InvalidArgument("speculation.max_depth", speculation.max_depth, f"1 to {MAX_TREE_DEPTH}")
